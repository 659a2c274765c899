"""Thinking before an answer: split, streamed, counted, limited, kept out of stop strings, calls and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from control_plane.text.tools.harmony import MARKS
from tandem_engine.thinking import Thinking
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import CHATML, byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.api.test_openai import EOS, HI, events
from tests.control_plane.text.thinking.templates import DEEPSEEK_R1, GPT_OSS, QWEN3

CHAT = "/v1/chat/completions"
RUN = "/client/v4/accounts/me/ai/run/demo"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def tokenizer() -> Tokenizer:
    """Return the small tokenizer with the marks of all families as tokens: harmony's are control tokens."""
    made = Tokenizer.from_str(byte_level_tokenizer().to_str())
    made.add_tokens(["<think>", "</think>"])
    made.add_special_tokens(list(MARKS))
    return made


def model(template: str) -> dict[str, Any]:
    made = tokenizer()
    return {
        "chat_template": template,
        "tokenizer_json": made.to_str().encode(),
        "vocab_size": made.get_vocab_size(),
        "identity": "cd" * 16,
    }


def says(text: str, *, per_delta: int = 1) -> ScriptedDispatcher:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return ScriptedDispatcher(Script([*ids, EOS], tokens_per_delta=per_delta))


async def chat(gateway: Gateway, **fields: Any) -> Any:
    response = await gateway.client.post(CHAT, json={"model": "demo", "messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


FAMILIES = [
    pytest.param(QWEN3, "<think>\nSo it is.\n</think>\n\nYes.", id="qwen3"),
    pytest.param(DEEPSEEK_R1, "So it is.\n</think>\n\nYes.", id="r1"),
    pytest.param(
        GPT_OSS,
        "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        id="gpt-oss",
    ),
]


@pytest.mark.parametrize(("template", "text"), FAMILIES)
async def test_thinking_has_a_field_and_a_count_of_its_own(template: str, text: str) -> None:
    async with serve(says(text), **model(template)) as gateway:
        answer = await chat(gateway)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "So it is.")
    num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
    num_answer = len(tokenizer().encode("Yes.").ids) - 1
    assert 0 < num_thought <= usage["completion_tokens"] - num_answer - 1


@pytest.mark.parametrize("per_delta", [1, 3, 100])
@pytest.mark.parametrize(("template", "text"), FAMILIES)
async def test_thinking_is_streamed_before_the_answer(template: str, text: str, per_delta: int) -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    async with serve(says(text, per_delta=per_delta), **model(template)) as gateway:
        body = {"model": "demo", "messages": HI, **stream}
        *chunks, last = events((await gateway.client.post(CHAT, json=body)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "So it is."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    kinds = [next(iter(delta)) for delta in deltas if delta and "role" not in delta]
    assert kinds == sorted(kinds, reverse=True), "all thinking comes first"
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(("template", "text"), FAMILIES)
async def test_workers_ai_has_it_too(template: str, text: str) -> None:
    async with serve(says(text), **model(template)) as gateway:
        native = (await gateway.client.post(RUN, json={"messages": HI})).json()["result"]
        streamed = events((await gateway.client.post(RUN, json={"messages": HI, "stream": True})).text)
        bare = (await gateway.client.post(RUN, json={"messages": HI, "include_reasoning": False})).json()["result"]
    assert (native["response"], native["reasoning_content"]) == ("Yes.", "So it is.")
    assert "".join(event.get("reasoning_content", "") for event in streamed) == "So it is."
    assert "".join(event["response"] for event in streamed) == "Yes."
    assert bare["response"] == "Yes." and "reasoning_content" not in bare


async def test_it_can_be_left_out_and_is_counted_all_the_same() -> None:
    async with serve(says("<think>\nSo.\n</think>\n\nYes."), **model(QWEN3)) as gateway:
        answer = await chat(gateway, include_reasoning=False)
        body = {"model": "demo", "messages": HI, "stream": True, "include_reasoning": False}
        chunks = events((await gateway.client.post(CHAT, json=body)).text)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert not any("reasoning_content" in chunk["choices"][0]["delta"] for chunk in chunks)


@pytest.mark.parametrize(
    ("template", "text", "kwargs"),
    [
        (QWEN3, "Yes.", {}),
        (QWEN3, "Yes, </think> is a mark.", {"chat_template_kwargs": {"enable_thinking": False}}),
        (QWEN3, "Yes.", {"reasoning_effort": "none"}),
        (CHATML, "<think> is a mark.", {}),
        (GPT_OSS, "<|channel|>final<|message|>Yes.", {}),
    ],
)
async def test_an_answer_without_thinking_is_whole(template: str, text: str, kwargs: dict[str, Any]) -> None:
    async with serve(says(text), **model(template)) as gateway:
        answer = await chat(gateway, **kwargs)
    message = answer["choices"][0]["message"]
    assert message["content"] == text.removeprefix("<|channel|>final<|message|>")
    assert "reasoning_content" not in message


async def test_stop_strings_and_log_probabilities_are_the_answers() -> None:
    text = "<think>\nStop here? No.\n</think>\n\nGo on. Stop here."
    async with serve(says(text), **model(QWEN3)) as gateway:
        answer = await chat(gateway, stop=["Stop"], logprobs=True)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "Go on. " and choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == "Stop here? No."
    assert "".join(token["token"] for token in choice["logprobs"]["content"]).startswith("Go on.")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            QWEN3,
            '<think>\nOslo.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>',
        ),
        (DEEPSEEK_R1, 'Oslo.\n</think>\n\n{"tool_calls": [{"name": "look", "arguments": {"city": "Oslo"}}]}'),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>Oslo.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
            '<|constrain|>json<|message|>{"city": "Oslo"}',
        ),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>Oslo.<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
            '<|message|>{"city": "Oslo"}<|call|>',
        ),
    ],
)
async def test_calls_come_after_the_thinking(template: str, text: str) -> None:
    async with serve(says(text), **model(template)) as gateway:
        answer = await chat(gateway, tools=[LOOK])
        body = {"model": "demo", "messages": HI, "tools": [LOOK], "stream": True}
        chunks = events((await gateway.client.post(CHAT, json=body)).text)
    choice = answer["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "Oslo."
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    streamed = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", [])]
    arguments = "".join(each["function"]["arguments"] for each in streamed)
    assert json.loads(arguments) == {"city": "Oslo"} and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def ids(*texts: str) -> tuple[int, ...]:
    made = tokenizer()
    return tuple(id for text in texts for id in made.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (QWEN3, {"response_format": JSON}, Thinking(ids("</think>"), (), ids("<think>")[0])),
        (DEEPSEEK_R1, {"response_format": JSON}, Thinking(ids("</think>"))),
        (DEEPSEEK_R1, {"thinking_token_budget": 7}, Thinking(ids("</think>"), (), None, 7)),
        (QWEN3, {"thinking_token_budget": 0, "tools": [LOOK]}, Thinking(ids("</think>"), (), ids("<think>")[0], 0)),
        (QWEN3, {"response_format": JSON, "reasoning_effort": "none"}, None),
        (QWEN3, {}, None),
        (CHATML, {"thinking_token_budget": 7, "response_format": JSON}, None),
        (
            GPT_OSS,
            {"response_format": JSON, "thinking_token_budget": 9},
            Thinking(
                ids("<|channel|>", "final", "<|message|>"),
                ids("<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"),
                None,
                9,
            ),
        ),
        (GPT_OSS, {"tools": [LOOK]}, None),
    ],
)
async def test_the_engine_gets_what_it_needs(template: str, fields: dict[str, Any], expected: Thinking | None) -> None:
    async with serve(says("Yes."), **model(template)) as gateway:
        await gateway.client.post(CHAT, json={"model": "demo", "messages": HI, **fields})
    assert gateway.dispatcher.requests[0].sampling.thinking == expected


async def test_marks_that_are_no_tokens_refuse_what_needs_them() -> None:
    dispatcher = ScriptedDispatcher(Script([*ids_of("So.</think>Yes."), EOS]))
    async with serve(dispatcher, chat_template=DEEPSEEK_R1) as gateway:
        body = {"model": "demo", "messages": HI, "thinking_token_budget": 7}
        refused = await gateway.client.post(CHAT, json=body)
        answer = await chat(gateway)
    assert refused.status_code == 400 and "thinking_token_budget needs a model whose marks" in refused.text
    assert answer["choices"][0]["message"]["content"] == "Yes."


async def test_a_budget_with_harmonys_tools_is_refused() -> None:
    async with serve(says("Yes."), **model(GPT_OSS)) as gateway:
        body = {"model": "demo", "messages": HI, "thinking_token_budget": 7, "tools": [LOOK]}
        refused = await gateway.client.post(CHAT, json=body)
    assert refused.status_code == 400 and "cannot be used with tools of this model" in refused.text


async def test_templates_get_the_thinking_of_earlier_turns_and_drop_what_they_want() -> None:
    turns = [
        *HI,
        {"role": "assistant", "content": "One.", "reasoning_content": "first thought"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "", "reasoning": "second thought", "tool_calls": [_call()]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    for template in (QWEN3, GPT_OSS):
        async with serve(says("Yes."), **model(template)) as gateway:
            await chat(gateway, messages=turns, tools=[LOOK])
        prompt = tokenizer().decode(list(gateway.dispatcher.requests[0].token_ids), skip_special_tokens=False)
        assert "second thought" in prompt and "first thought" not in prompt


def _call() -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}

"""OpenAI's own client and wire format work, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from control_plane.api.http.request_context import ServedModels
from control_plane.generation import ModelDescription, TokenRequest
from tandem_runtime.errors import Overloaded
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import OneModel, byte_level_tokenizer, description, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

EOS = 1
HELLO = [*ids_of("Hello world, 你好 😀"), EOS]
HI: list[Any] = [{"role": "user", "content": "hi"}]


def sdk(gateway: Gateway, base: str = "/v1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.url + base, api_key="x", max_retries=0)


def events(body: str) -> list[Any]:
    assert body.endswith("data: [DONE]\n\n")
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("base", ["/v1", "/client/v4/accounts/me/ai/v1"])
async def test_the_sdk_chats_streamed_and_not(base: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, num_cached_tokens=2))) as gateway, sdk(gateway, base) as client:
        whole = await client.chat.completions.create(model="demo", messages=HI)
        stream = await client.chat.completions.create(
            model="demo", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == "Hello world, 你好 😀"
    assert whole.choices[0].finish_reason == "stop" and whole.id.startswith("chatcmpl-") and whole.usage
    assert whole.usage.completion_tokens == len(HELLO)
    assert whole.usage.prompt_tokens_details and whole.usage.prompt_tokens_details.cached_tokens == 2
    assert whole.system_fingerprint and whole.system_fingerprint == chunks[0].system_fingerprint
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello world, 你好 😀"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert gateway.dispatcher.requests[0].account == ("me" if "accounts" in base else "default")


async def test_a_chat_becomes_the_templates_tokens() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway, sdk(gateway) as client:
        await client.chat.completions.create(
            model="demo",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "tool", "content": "42", "tool_call_id": "call_1"},
            ],
        )
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    expected = byte_level_tokenizer().encode(text, add_special_tokens=False).ids
    assert list(gateway.dispatcher.requests[0].token_ids) == expected


async def test_n_choices_each_have_their_own_text() -> None:
    script = Script(choices={0: [*ids_of("Hello"), EOS], 1: [*ids_of("the fox"), EOS]})
    async with serve(ScriptedDispatcher(script)) as gateway, sdk(gateway) as client:
        whole = await client.chat.completions.create(model="demo", messages=HI, n=2, seed=-3)
        streamed = {0: "", 1: ""}
        async for chunk in await client.chat.completions.create(model="demo", messages=HI, n=2, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in whole.choices] == ["Hello", "the fox"] == list(streamed.values())


async def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway, sdk(gateway) as client:
        whole = await client.chat.completions.create(
            model="demo", messages=HI, logprobs=True, top_logprobs=2, logit_bias={"5": -100}
        )
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "Hello world, 你好 😀"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert gateway.dispatcher.requests[0].sampling.logit_bias == {5: -100}


async def test_completions_take_text_ids_and_lists_of_both() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway, sdk(gateway) as client:
        for prompt in ("Once", [4, 5], ["Once", "upon"], [[4, 5], [6]]):
            result = await client.completions.create(model="demo", prompt=prompt, n=2)
            num_prompts = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
            assert [choice.index for choice in result.choices] == list(range(2 * num_prompts))
            assert {choice.text for choice in result.choices} == {"Hello world, 你好 😀"}
        sent = [request.token_ids for request in gateway.dispatcher.requests]
    assert sent[:2] == [(0, *ids_of("Once")), (4, 5)] and sent[4:] == [(4, 5), (6,)]
    assert len({request.request_id for request in gateway.dispatcher.requests}) == 6


async def test_completions_echo_the_prompt_before_each_choice() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway, sdk(gateway) as client:
        whole = await client.completions.create(model="demo", prompt=["Once ", "upon "], echo=True, stop="world")
        parts = {0: "", 1: ""}
        async for chunk in await client.completions.create(
            model="demo", prompt=["Once ", "upon "], echo=True, stop="world", stream=True
        ):
            parts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == ["Once Hello ", "upon Hello "] == list(parts.values())


def scores(request: TokenRequest) -> Script:
    """Answer HELLO to a request, and what its bias wants to one that asks how likely a token of the prompt is."""
    target = next(iter(request.sampling.logit_bias), None)
    return Script(HELLO) if target is None else Script([target], finish_reason="length")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_log_probabilities_of_the_prompts_tokens_before_those_of_the_answer(stream: bool) -> None:
    dispatcher = ScriptedDispatcher()
    dispatcher.choose = scores
    ask: dict[str, Any] = {"model": "demo", "prompt": ["Once upon", [5, 6, 7]], "echo": True, "logprobs": 2, "n": 2}
    async with serve(dispatcher) as gateway, sdk(gateway) as client:
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)] if stream else []
        answers = chunks or [await client.completions.create(**ask)]
    parts: dict[int, list[Any]] = {}
    for answer in answers:
        for choice in answer.choices:
            parts.setdefault(choice.index, []).append(choice)
    assert set(parts) == {0, 1, 2, 3}
    for index, ids in ((0, [0, *ids_of("Once upon")]), (2, [5, 6, 7])):
        text = "".join(part.text for part in parts[index])
        lists = [part.logprobs for part in parts[index] if part.logprobs is not None]
        tokens = [token for each in lists for token in each.tokens]
        offsets = [offset for each in lists for offset in each.text_offset]
        logprobs = [logprob for each in lists for logprob in each.token_logprobs]
        prompt = byte_level_tokenizer().decode(ids)
        assert text == prompt + "Hello world, 你好 😀"
        assert tokens[1 : len(ids)] == [byte_level_tokenizer().decode([token_id]) for token_id in ids[1:]]
        assert (offsets[0], offsets[len(ids)]) == (0, len(prompt)) and offsets == sorted(offsets)
        assert logprobs[0] is None and set(logprobs[1:]) == {-0.5}
        assert len(tokens) == len(logprobs) == len(offsets) == len(ids) + len(HELLO) - 1
    scoring = [request for request in dispatcher.requests if request.sampling.logit_bias]
    assert {tuple(request.token_ids) for request in scoring} >= {(5,), (5, 6)} and all(
        r.sampling.max_tokens == 1 for r in scoring
    )
    assert all(each.closed.is_set() for each in dispatcher.streams)


async def test_an_echo_that_cannot_be_scored_starts_no_answer() -> None:
    dispatcher = ScriptedDispatcher()
    dispatcher.choose = lambda request: (
        Script(refuse=Overloaded("full")) if request.sampling.logit_bias else Script(HELLO)
    )
    async with serve(dispatcher) as gateway:
        body = {"model": "demo", "prompt": "Once upon", "echo": True, "logprobs": 0}
        response = await gateway.client.post("/v1/completions", json=body)
        assert response.status_code == 429 and dispatcher.streams == []
        too_long = await gateway.client.post("/v1/completions", json={**body, "prompt": [[5] * 1100, [6] * 1000]})
        assert too_long.status_code == 400 and "up to 2,048 prompt tokens" in too_long.text
        assert not [request for request in dispatcher.requests if not request.sampling.logit_bias]


async def test_completions_logprobs_are_four_lists_side_by_side() -> None:
    async with serve(ScriptedDispatcher(Script([*ids_of("Hello world"), EOS]))) as gateway, sdk(gateway) as client:
        result = await client.completions.create(model="demo", prompt="Once", logprobs=1)
    logprobs = result.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == "Hello world"
    starts = [len("".join(logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
    assert logprobs.text_offset == starts
    assert len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs) == len(logprobs.tokens)


async def test_models_are_listed_and_found_by_id_or_alias() -> None:
    async with serve() as gateway, sdk(gateway) as client:
        assert [model.id async for model in client.models.list()] == ["@tandem/demo"]
        assert (await client.models.retrieve("demo")).id == "@tandem/demo"
        with pytest.raises(openai.NotFoundError, match=r"no model 'x/y'"):
            await client.models.retrieve("x/y")


def test_the_list_of_models_is_prepared_once_until_a_model_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    def make(models: Sequence[ModelDescription]) -> bytes:
        made.append([model.context_length for model in models])
        return b"list"

    served, catalog = ServedModels(), OneModel(description(context_length=77))
    assert [served.listed(catalog, make) for _ in range(3)] == [b"list"] * 3
    (model,) = catalog.list()
    for models in ([replace(model, context_length=99)], [], []):
        monkeypatch.setattr(catalog, "list", lambda models=models: models)
        served.listed(catalog, make)
    assert made == [[77], [99], []]


async def test_a_stream_is_data_lines_only_and_ends_with_done() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        body = {"model": "demo", "messages": HI, "stream": True}
        response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream"
    assert {event["object"] for event in events(response.text)} == {"chat.completion.chunk"}
    assert not any("usage" in event for event in events(response.text))


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"functions": [{}]}, "functions", "not supported here; send tools"),
        ({"function_call": "auto"}, "function_call", "not supported here; send tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"temperature": "0.5"}, "temperature", 'should be a valid number, got "0.5"'),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2, got 2.5"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": True}, "n", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids as keys"),
        ({"top_logprobs": 2}, None, "top_logprobs needs logprobs"),
        ({"messages": "hi"}, "messages", 'messages must be a list, got "hi"'),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", 'got "robot"'),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string, got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "image_url",
        ),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(
    changes: dict[str, Any], param: str | None, words: str
) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post("/v1/chat/completions", json={"model": "demo", "messages": HI, **changes})
    assert response.status_code == 400 and gateway.dispatcher.requests == []
    error = response.json()["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error"
    assert error["param"] == param


async def test_what_changes_nothing_is_tolerated() -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stop": None, "tools": [],
        "seed": None, "n": None, "response_format": {"type": "text"}, "logit_bias": None, "functions": None,
        "options": {},
    }  # fmt: skip
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post("/v1/chat/completions", json={"model": "demo", "messages": HI, **harmless})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "non-empty list"),
        ({"prompt": [1, "a"]}, "list of token ids"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of"),
        (
            {"echo": True, "logprobs": 1, "prompt": [[5] * 1025] * 2},
            "echo with logprobs takes up to 2,048 prompt tokens",
        ),
        ({"stop": ["a"] * 5}, "stop must be a string or a list of up to 4 strings"),
        ({"functions": [{}]}, "functions is not supported"),
        ({"store": False, "frequency": False}, "frequency is not a field of this request"),
        ({"stop_token_ids": [2**33]}, "stop_token_ids has token id 8589934592"),
        ({"prompt": ["a"] * 300}, "prompt has 300 prompts, the maximum is 256"),
        ({"prompt": ["a"] * 200, "n": 2}, "more than 256 answers"),
    ],
)
async def test_completions_refuse_what_they_cannot_do(changes: dict[str, Any], words: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post("/v1/completions", json={"model": "demo", "prompt": "a", **changes})
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert all(stream.closed.is_set() for stream in gateway.dispatcher.streams)

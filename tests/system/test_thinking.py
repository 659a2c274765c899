"""Thinking from the engine to the client, with random models; the raw tokens of each answer are read a second time."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from control_plane.text.thinking.forms import THINK
from control_plane.text.tools.harmony import MARKS
from tests.control_plane.text.thinking import templates
from tests.control_plane.text.thinking.test_splitters import harmony_reference, reference
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet
from tests.system.streams import client

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CASES = 500
_CONCURRENCY = 24
_EOS = "<|im_end|>"
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_OWN_MARKS = ("<think>", "</think>")
_BLANKS = ("Ċ", "Ġ")
"""A new line and a space, as the alphabet writes them."""
_BIAS = {"qwen3": 4.0, "deepseek-r1": 4.0, "gpt-oss": 6.5}
_LIKELY = {"qwen3": _OWN_MARKS, "deepseek-r1": _OWN_MARKS, "gpt-oss": ("<|end|>", "<|return|>", "<|call|>")}
"""Marks that a random model writes every few tokens, because so much is added to their logits."""
_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": _CITY}}]
_ANSWER = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
_JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _ANSWER}}
_FAMILIES = {"qwen3": templates.QWEN3, "deepseek-r1": templates.DEEPSEEK_R1, "gpt-oss": templates.GPT_OSS}


def template_of(family: str) -> str:
    """Return the family's published template if TANDEM_CHAT_TEMPLATES names a folder with it, else our short one."""
    folder = os.environ.get("TANDEM_CHAT_TEMPLATES")
    return (Path(folder) / f"{family}.jinja").read_text() if folder else _FAMILIES[family]


def letters_tokenizer() -> Tokenizer:
    """Return a tokenizer of single bytes and the marks of all families."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(["<s>", _EOS, *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", _EOS, "<|im_start|>", *MARKS])
    made.add_tokens(list(_MARKS))
    return made


def make_model(folder: Path, family: str) -> Path:
    """Write a small random model with the family's template."""
    tokenizer = letters_tokenizer()
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = tokenizer.encode(f"{_EOS}<|return|><|call|>", add_special_tokens=False).ids
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096, num_key_value_heads=2,
        initializer_range=0.2, bos_token_id=0, eos_token_id=ends if family == "gpt-oss" else 1, **shape,
    )  # fmt: skip
    torch.manual_seed(5)
    target = folder / family
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=_EOS)
    whole.chat_template = template_of(family)
    whole.save_pretrained(target)
    return target


def biases(family: str) -> dict[str, float]:
    """Keep answers to ASCII, whose pieces are texts, and to the family's own marks; make these likely."""
    tokenizer = letters_tokenizer()
    banned = [
        tokenizer.token_to_id(letter)
        for letter in pre_tokenizers.ByteLevel.alphabet()
        if not (letter.isascii() or letter in _BLANKS)
    ]
    others = _OWN_MARKS if family == "gpt-oss" else MARKS
    banned += [tokenizer.token_to_id(mark) for mark in ("<s>", "<|im_start|>", *others)]
    return {str(token_id): -100.0 for token_id in banned} | {
        str(tokenizer.token_to_id(mark)): _BIAS[family] for mark in (_EOS, *_LIKELY[family])
    }


@dataclass(frozen=True)
class Case:
    """One question, asked as a stream and whole. The same seed gives the same tokens (law 3)."""

    number: int
    family: str
    kind: str
    """free, json or tools"""
    budget: int | None

    @property
    def name(self) -> str:
        return f"case {self.number}."

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.family, "messages": [{"role": "user", "content": self.name}]}
        body |= {
            "seed": self.number,
            "max_tokens": 400,
            "logit_bias": biases(self.family),
            "thinking_token_budget": self.budget,
        }
        if self.kind == "json":
            body["response_format"] = _JSON
        if self.has_tools:
            body |= {"tools": _TOOLS, "tool_choice": "required" if self.kind == "tools" else "auto"}
            body["parallel_tool_calls"] = self.family == "qwen3"
        return body

    @property
    def begins_thinking(self) -> bool:
        """Whether the prompt ends with the opening mark."""
        end = template_of(self.family)[-100:]
        return "<think>" in end and "</think>" not in end

    @property
    def has_tools(self) -> bool:
        """Whether the chat has tools: of gpt-oss always, so that a grammar keeps a random model to the channels."""
        return self.kind == "tools" or self.family == "gpt-oss"


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    thinking: str
    text: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    num_thinking_tokens: int


def cases() -> list[Case]:
    chance = random.Random(17)
    made = []
    for number in range(NUM_CASES):
        family = chance.choice(list(_FAMILIES))
        kind = chance.choice(("json", "tools") if family == "gpt-oss" else ("free", "json", "tools"))
        made.append(Case(number, family, kind, None if family == "gpt-oss" else chance.choice((None, 0, 5, 24))))
    return made


class Recorded:
    """A fleet and the raw tokens of every request, by its case."""

    def __init__(self, fleet: Fleet) -> None:
        self.base_url = fleet.base_url
        self.raw: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self._streams: dict[str, list[RequestStream]] = defaultdict(list)
        self._tokenizer = letters_tokenizer()
        self._submit = fleet.gateway.dispatcher.submit
        fleet.gateway.dispatcher.submit = self.submit  # type: ignore[method-assign]

    async def submit(self, request: TokenRequest) -> RequestStream:
        stream = await self._submit(request)
        found = re.search(r"case \d+\.", self._tokenizer.decode(list(request.token_ids)))
        self._streams[found[0] if found else ""].append(stream)
        return stream

    def tokens(self, case: Case) -> list[int]:
        """Return the tokens of a case, which are the same for both of its requests, without the end."""
        first, second = (list(stream.state.choices[0].tokens) for stream in self._streams[case.name])
        assert first == second, f"{case}: the stream has other tokens than the whole answer"
        return first


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Recorded]:
    folder = tmp_path_factory.mktemp("thinking")
    async with Fleet(folder) as fleet:
        fleet.start("kv", "kv-0")
        for family in _FAMILIES:
            flags = ("--model", str(make_model(folder, family)), *SMALL)
            fleet.start("decode", f"decode-{family}", *flags)
            if family == "qwen3":  # one of them with a hand-over
                fleet.start("prefill", f"prefill-{family}", *flags)
        await fleet.ready()
        yield Recorded(fleet)


async def whole(http: httpx.AsyncClient, case: Case) -> Answer:
    response = await http.post("/v1/chat/completions", json=case.body())
    assert response.status_code == 200, (case, response.text)
    answer = response.json()
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    thinking, text = message.get("reasoning_content") or "", message.get("content") or ""
    return Answer(thinking, text, calls, choice["finish_reason"], _num_thinking(answer["usage"]))


async def streamed(http: httpx.AsyncClient, case: Case) -> Answer:
    body = case.body() | {"stream": True, "stream_options": {"include_usage": True}}
    thinking = text = reason = ""
    names, arguments, usage = dict[int, str](), defaultdict[int, str](str), dict[str, Any]()
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                # gpt-oss may think again behind a text that comes before calls.
                assert case.family == "gpt-oss" or not (delta.get("reasoning_content") and text), "thinking is first"
                thinking += delta.get("reasoning_content") or ""
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    names.setdefault(call["index"], call["function"].get("name") or "")
                    arguments[call["index"]] += call["function"].get("arguments") or ""
    calls = tuple((names[index], arguments[index]) for index in sorted(names))
    return Answer(thinking, text, calls, reason, _num_thinking(usage))


def _num_thinking(usage: Mapping[str, Any]) -> int:
    return int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0))


def expected_of(case: Case, tokens: list[int], tokenizer: Tokenizer) -> tuple[str, str]:
    """Read the raw answer a second time: by the templates' definitions."""
    raw = tokenizer.decode(tokens, skip_special_tokens=case.family != "gpt-oss").removesuffix(_EOS)
    if case.family == "gpt-oss":
        return harmony_reference(raw, takes_calls=case.has_tools)
    return reference(THINK, "thinking" if case.begins_thinking else "undecided", raw)


def num_thinking_of(case: Case, tokens: list[int], tokenizer: Tokenizer) -> int:
    """Count the tokens up to the closing mark, or all if the answer ends within the thinking."""
    closing, opening = tokenizer.encode("</think><think>", add_special_tokens=False).ids
    told = [token for token in tokens if token != tokenizer.token_to_id(_EOS)]
    text = tokenizer.decode(told, skip_special_tokens=False).lstrip()
    if not case.begins_thinking and not text.startswith("<think>"):
        return 0
    start = 0 if case.begins_thinking else told.index(opening)
    return told.index(closing, start) + 1 if closing in told[start:] else len(told)


async def test_500_answers_are_what_a_second_reading_of_their_tokens_says(recorded: Recorded) -> None:
    tokenizer, turns = letters_tokenizer(), asyncio.Semaphore(_CONCURRENCY)
    seen: dict[str, int] = defaultdict(int)

    async def ask(http: httpx.AsyncClient, case: Case) -> None:
        async with turns:
            answer = await whole(http, case)
            assert await streamed(http, case) == answer, case
        check(case, answer)

    def check(case: Case, answer: Answer) -> None:
        tokens = recorded.tokens(case)
        seen[f"{case.family} {case.kind} {answer.finish_reason}"] += 1
        if case.family == "gpt-oss" and answer.finish_reason == "length":
            return  # it may end within a header, which the reference does not know
        thinking, text = expected_of(case, tokens, tokenizer)
        assert answer.thinking.rstrip("\n") == thinking.rstrip("\n"), case
        if case.family != "gpt-oss":
            assert answer.num_thinking_tokens == num_thinking_of(case, tokens, tokenizer), case
            begins = case.begins_thinking or tokens[:1] == tokenizer.encode("<think>").ids
            if case.budget is not None and begins:  # a blank before the mark decides against thinking, for the engine
                assert answer.num_thinking_tokens <= case.budget + 2, case
        if not case.has_tools or answer.finish_reason == "stop":
            assert answer.text == text, case
        elif answer.finish_reason == "tool_calls":
            assert all(arguments in text for _, arguments in answer.calls), case
        if case.kind == "json" and answer.finish_reason == "stop":
            assert answer.text, (case, answer)
            jsonschema_rs.validate(_ANSWER, json.loads(answer.text))
        for name, arguments in answer.calls if answer.finish_reason == "tool_calls" else ():
            jsonschema_rs.validate(_CITY, json.loads(arguments))
            assert name == "look", case
        seen[f"{case.family} thought"] += bool(answer.thinking and (answer.text or answer.calls))

    async with client(recorded.base_url) as http, asyncio.TaskGroup() as group:
        for case in cases():
            group.create_task(ask(http, case))
    for family in _FAMILIES:
        kinds = ("json stop", "tools tool_calls", "thought")
        assert min(seen[f"{family} {kind}"] for kind in kinds) > 10, dict(seen)

"""A text process prepares every body exactly as the same code does inline, errors included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.text.prepared import Endpoint, Preparation, TextJob
from control_plane.text.text_service import InlinePreparer, Preparer
from control_plane.text.tokenizer import TokenizerCache
from control_plane.text_processes.bodies import parse
from control_plane.text_processes.pool import TextProcesses
from tandem_runtime.errors import TandemError
from tests.control_plane.api.model import description
from tests.control_plane.text_processes.pools import resolved_as


class Both:
    """A pool and the inline preparer, on an event loop of their own."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._preparers: list[Preparer] = [runner.run(_started()), InlinePreparer(Preparation(), TokenizerCache())]

    def results(self, endpoint: Endpoint, raw: bytes) -> list[Any]:
        job = TextJob(endpoint, "demo", (("rejectIfBusy", "true"),) if endpoint == "run" else (), b"salt")
        return [self._runner.run(_result(preparer, job, raw)) for preparer in self._preparers]

    def close(self) -> None:
        pool = self._preparers[0]
        assert isinstance(pool, TextProcesses)
        self._runner.run(pool.close())


async def _started() -> TextProcesses:
    pool = TextProcesses()
    pool.start()
    return pool


async def _result(preparer: Preparer, job: TextJob, raw: bytes) -> Any:
    try:
        body, vocabulary = await preparer.prepare(job, raw, "me", parse, resolved_as(description()))
    except TandemError as error:
        return type(error), error.message, error.field
    return body, vocabulary.decode(range(500))


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with asyncio.Runner() as runner:
        made = Both(runner)
        yield made
        made.close()


texts = st.text(max_size=60) | st.sampled_from(["<|im_end|>", "Hello <s> you", "世界 😀", "\ud800", ""])
options = st.fixed_dictionaries(
    {"seed": st.integers(1, 9)},
    optional={
        "max_tokens": st.integers(0, 3),
        "n": st.integers(1, 3),
        "stop": st.lists(texts, max_size=3),
        "logprobs": st.booleans() | st.integers(0, 2),
        "stream": st.booleans(),
        "response_format": st.just({"type": "json_object"}),
        "guided_regex": st.sampled_from(["a+b", "(", "[0-9]{3}"]),
        "cache_salt": st.just("mine"),
        "tools": st.just([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]),
        "unknown": st.just(1),
        "options": st.just({"gateway": {"requestTimeoutMs": 5000}}),
    },
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts})
    | st.integers(),
    max_size=4,
)
chats = st.builds(lambda fields, sent: {"model": "demo", "messages": sent, **fields}, options, messages)
prompts = texts | st.lists(texts, max_size=3) | st.lists(st.integers(0, 450), max_size=40)
completions = st.builds(
    lambda fields, prompt, echo: {"model": "demo", "prompt": prompt, "echo": echo, **fields},
    options,
    prompts,
    st.booleans(),
)
runs = st.builds(lambda fields, prompt: {"prompt": prompt, **fields}, options, texts)


def encoded(value: Any) -> bytes:

    return json.dumps(value).encode()


@settings(max_examples=60, deadline=None)
@given(value=chats)
def test_chats(both: Both, value: Any) -> None:
    in_a_process, inline = both.results("chat", encoded(value))
    assert in_a_process == inline


@settings(max_examples=60, deadline=None)
@given(value=completions)
def test_completions(both: Both, value: Any) -> None:
    in_a_process, inline = both.results("completions", encoded(value))
    assert in_a_process == inline


@settings(max_examples=40, deadline=None)
@given(value=runs)
def test_runs_of_workers_ai(both: Both, value: Any) -> None:
    for endpoint, body in (("run", value), ("binding", {"inputs": value}), ("run_named_in_body", {"model": "demo"})):
        in_a_process, inline = both.results(endpoint, encoded(body))  # type: ignore[arg-type]
        assert in_a_process == inline


@settings(max_examples=40, deadline=None)
@given(raw=st.binary(max_size=40))
def test_bytes_that_are_no_body(both: Both, raw: bytes) -> None:
    in_a_process, inline = both.results("chat", raw)
    assert in_a_process == inline and isinstance(in_a_process[0], type)


def test_a_deeply_nested_body(both: Both) -> None:
    raw = msgspec.json.encode({"model": "demo"})[:-1] + b',"metadata":' + b"[" * 9000 + b"]" * 9000 + b"}"
    in_a_process, inline = both.results("chat", raw)
    assert in_a_process == inline

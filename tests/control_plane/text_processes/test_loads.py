"""Tokenizers of as many models as are served stay loaded, and a bad one is tried less and less often."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
import structlog.testing

from control_plane.generation import ModelDescription
from control_plane.text_processes import tokenizer_load
from control_plane.text_processes.pool import TextProcesses
from tandem_runtime.errors import InternalError
from tests.control_plane.api.model import description
from tests.control_plane.text_processes.pools import chat_body, pool, prepare, resolved_as
from tests.tandem_worker.kv_harness import until

_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def numbered(number: int) -> ModelDescription:
    return description(identity=f"{number:032x}")


async def chat(processes: TextProcesses, model: ModelDescription) -> None:
    await prepare(processes, chat_body("Hello"), resolve=resolved_as(model))


async def test_fifty_served_models_in_turn_are_loaded_once() -> None:
    """Finding 8: with more than 32 in turn, the zygote began anew, and with more than 16 each was loaded again."""
    models = [numbered(number) for number in range(50)]
    async with pool() as processes:
        processes.zygote.keep(lambda: frozenset(model.text_key for model in models))
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                for model in models:
                    await chat(processes, model)
        assert [line["event"] for line in lines].count("tokenizer_loaded") == 50
        assert len(processes.zygote.keys) == 50


async def test_of_models_that_are_not_served_a_bounded_number_of_bytes_stays_loaded() -> None:
    size = len(numbered(0).tokenizer_json)
    served = numbered(0)
    processes = TextProcesses(max_gone_bytes=2 * size)
    processes.start()
    try:
        processes.zygote.keep(lambda: {served.text_key})
        for number in range(6):
            await chat(processes, numbered(number))
        await chat(processes, served)
        # What a load leaves behind is dropped by the next one.
        assert processes.zygote.keys == {numbered(number).text_key for number in (0, 3, 4, 5)}
        await chat(processes, numbered(3))  # still there, and now the last one used
        await chat(processes, numbered(1))
        await chat(processes, numbered(2))
        assert processes.zygote.keys == {numbered(number).text_key for number in (0, 3, 1, 2)}
    finally:
        await processes.close()


async def test_a_template_without_an_end_is_the_fault_of_its_model_and_delays_no_other() -> None:
    endless = description(identity="ee" * 16, chat_template=_ENDLESS)
    async with pool() as processes:
        loading = asyncio.create_task(processes.zygote.load(endless))
        await chat(processes, numbered(0))
        assert not loading.done()  # it takes 2 s of a core
        for number in range(1, 3):
            await chat(processes, numbered(number))
        with pytest.raises(InternalError, match=r"template of @tandem/demo did not render one word within 2 s"):
            await loading
        assert len(processes.zygote.keys) == 3
        await chat(processes, numbered(0))


async def test_a_file_that_cannot_be_loaded_is_tried_less_and_less_often() -> None:
    now = 100.0
    broken = description(identity="cd" * 16, tokenizer_json=b"{}")
    async with pool() as processes:
        processes.zygote._failures.clock = lambda: now
        tried_at = []
        for _ in range(200):
            with structlog.testing.capture_logs() as lines, pytest.raises(InternalError, match="cannot be read"):
                await processes.zygote.load(broken)
            tried_at += [now - 100.0 for line in lines if line["event"] == "tokenizer_failed"]
            now += 1.0
        assert tried_at == [0.0, 10.0, 30.0, 70.0, 150.0]


async def test_a_vocabulary_that_the_gateway_could_not_hold_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_load, "MAX_VOCABULARY_BYTES", 100)
    async with pool() as processes:
        with pytest.raises(InternalError, match="at most 100 are read"):
            await processes.zygote.load(numbered(0))
        assert processes.zygote.keys == frozenset()


async def test_the_end_of_the_generation_that_loads_is_not_the_files_fault() -> None:
    slow = description(identity="ee" * 16, chat_template=_ENDLESS)
    async with pool() as processes:
        await chat(processes, numbered(0))
        root = psutil.Process(processes.zygote.pid)
        before = {child.pid for child in root.children(recursive=True)}
        loading = asyncio.create_task(processes.zygote.load(slow))
        await until(lambda: len({child.pid for child in root.children(recursive=True)} - before) == 1)
        (fork,) = {child.pid for child in root.children(recursive=True)} - before
        generation = processes.zygote._current()
        generation.is_current = False  # as when it has been lost: the fork's end tells nothing of the file
        os.kill(fork, signal.SIGKILL)
        await until(lambda: len({child.pid for child in root.children(recursive=True)} - before - {fork}) == 1)
        generation.is_current = True
        with pytest.raises(InternalError, match="did not render"):
            await loading

"""The tables of all services are read over the streams that are open to them; only earlier releases are called."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.audit import table_reader
from control_plane.audit.table_reader import MAX_ROWS, TableReader
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1.tables_pb2 import HandleRow, RequestRow
from tandem_runtime.errors import Unavailable
from tandem_runtime.kv.table_parts import TableQuestions
from tests.control_plane.audit.audited_services import scripted_service, streaming
from tests.control_plane.scripted_worker import PREFILL, ScriptedWorker, kv_load, kv_service
from tests.loop_turns import counted_turns


async def test_no_service_that_answers_on_its_stream_is_called() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    decode, prefill = await ScriptedWorker("d").start(), await ScriptedWorker("p", PREFILL).start()
    decode.tables.requests.add(request_id="r")
    async with scripted_service(registry) as kv, streaming(registry) as (streams, reader):
        kv.tables.handles.add(request_id="r")
        for worker in (decode, prefill):
            worker.register(registry)
        await streams.until_open("d", "p", "kv-0")
        for _ in range(2):
            answered, silent = await reader.read(registry.workers())
            assert silent == {}
            told = {each.worker.worker_id: each.tables for each in answered}
            assert told == {"d": decode.tables, "p": prefill.tables, "kv-0": kv.tables}
        assert [question.max_rows for question in decode.questions] == [MAX_ROWS] * 2
        assert (kv.num_asked, kv.num_calls, decode.num_table_calls, prefill.num_table_calls) == (2, 0, 0, 0)
    for worker in (decode, prefill):
        await worker.kill()


async def test_services_of_an_earlier_release_are_called() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    worker = await ScriptedWorker("d").start()
    worker.answers_tables = False
    async with (
        scripted_service(registry, answers_on_stream=False) as kv,
        scripted_service(registry, "kv-1", answers_on_stream=True) as new,
        streaming(registry) as (streams, reader),
    ):
        worker.register(registry)
        await streams.until_open("d", "kv-0", "kv-1")
        answered, silent = await reader.read(registry.workers())
        assert ({each.worker.worker_id for each in answered}, silent) == ({"d", "kv-0", "kv-1"}, {})
        assert (worker.questions, worker.num_table_calls) == ([], 1)
        assert (kv.num_asked, kv.num_calls, new.num_asked, new.num_calls) == (0, 1, 1, 0)
    await worker.kill()


async def test_a_worker_that_is_restarted_in_the_middle_is_silent_and_its_next_life_answers() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    first = (await ScriptedWorker("d").start()).register(registry)
    first.sends_tables = False
    async with streaming(registry) as (streams, reader):
        await streams.until_open("d")
        reading = asyncio.create_task(reader.read(registry.workers()))
        await first.until(lambda worker: bool(worker.questions))
        await first.kill()
        answered, silent = await reading
        assert answered == []
        assert "ended before its tables had come" in silent["d-life-0"]
        second = (await ScriptedWorker("d", life=1).start()).register(registry)
        await streams.until_open("d")
        [service], silent = await reader.read(registry.workers())
        assert (service.tables, silent) == (second.tables, {})
        await second.kill()


async def test_a_worker_that_never_answers_is_silent_and_delays_nobody() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    hangs, good = (
        (await ScriptedWorker("hangs").start()).register(registry),
        (await ScriptedWorker("good").start()).register(registry),
    )
    hangs.sends_tables = False
    async with streaming(registry, answer_seconds=0.3) as (streams, reader):
        await streams.until_open("hangs", "good")
        [service], silent = await reader.read(registry.workers())
        assert service.worker.worker_id == "good"
        assert silent == {"hangs-life-0": "worker hangs has not sent its tables within 0.3 seconds"}
    for worker in (hangs, good):
        await worker.kill()


async def test_a_worker_without_a_stream_is_silent_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_channel(info: Any, member: object) -> Any:
        raise AssertionError("it is called")

    monkeypatch.setattr(table_reader, "open_worker_channel", open_channel)
    registry = WorkerRegistry(3.0, 5.0)
    ScriptedWorker("d").register(registry)  # nothing listens at its address
    registry.register(kv_service("kv-0"), kv_load())
    async with streaming(registry) as (_, reader):
        answered, silent = await reader.read(registry.workers())
    assert answered == []
    assert silent == {
        "d-life-0": "no stream to worker d is open",
        "kv-0-life": "no stream to KV service kv-0 is open",
    }


async def test_tables_with_as_many_rows_as_may_be_arrive_whole() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    worker = (await ScriptedWorker("d").start()).register(registry)
    for number in range(MAX_ROWS):
        worker.tables.requests.append(RequestRow(request_id=f"request {number}", gateway_id="g" * 40))
    async with scripted_service(registry) as kv, streaming(registry) as (streams, reader):
        for number in range(MAX_ROWS):
            kv.tables.handles.append(HandleRow(handle_id=number.to_bytes(16, "big"), request_id="r" * 40))
        await streams.until_open("d", "kv-0")
        answered, silent = await reader.read(registry.workers())
        assert silent == {}
        assert {each.worker.worker_id: each.tables for each in answered} == {"d": worker.tables, "kv-0": kv.tables}
    await worker.kill()


@pytest.mark.parametrize("answers", [True, False], ids=["on streams", "by calls"])
async def test_the_services_of_a_large_fleet_are_asked_one_in_each_turn_of_the_loop(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 channels and calls that began in one turn stopped all streams for 0.2 s, every ten seconds."""
    asked: list[int] = []

    def open_channel(info: Any, member: object) -> Any:
        asked.append(turns.now)
        raise Unavailable("nobody is there")

    class Streams:
        def questions(self, worker: Worker) -> TableQuestions:
            questions = TableQuestions(worker.worker_id)
            questions.opened((lambda question: asked.append(turns.now)) if answers else None)
            return questions

    monkeypatch.setattr(table_reader, "open_worker_channel", open_channel)
    registry = WorkerRegistry(3.0, 5.0)
    for number in range(50):
        registry.register(kv_service(f"kv-{number}"), kv_load())
    with counted_turns() as turns:
        answered, silent = await TableReader(Streams(), Streams(), answer_seconds=0.1).read(registry.workers())
    assert answered == []
    assert len(set(asked)) == len(silent) == 50

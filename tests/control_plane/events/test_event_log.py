"""Tests that every event is kept once, in one order, within bounds, and that nothing of a caller's texts gets in."""

from __future__ import annotations

import asyncio
import string
from pathlib import Path
from typing import Any

import pytest

from control_plane.events import log as event_log
from control_plane.events.event import MAX_TEXT_CHARACTERS, Event, new_event
from control_plane.events.kinds import KINDS
from control_plane.events.log import EventLog
from control_plane.events.store import EventStore, Wanted
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from tandem_runtime import log as logs
from tandem_runtime.errors import InvalidRequest, Unavailable
from tests.control_plane.events.conftest import NOW_MS, opened_log, store_of
from tests.control_plane.postgres import Postgres


async def test_events_are_numbered_in_the_order_in_which_they_came(database: Database) -> None:
    log = await opened_log(database)
    for worker in ("a", "b", "c"):
        log.record("worker_ready", worker=worker, role="decode", model="m", host="h")
    await log.flush()
    events = await store_of(database).after(0)
    assert [(event.id, event.worker) for event in events] == [(1, "a"), (2, "b"), (3, "c")]
    assert events[0].message == "decode worker a is ready"
    assert (events[0].time_ms, events[0].gateway, events[0].host, events[0].model) == (NOW_MS, "g1", "h", "m")


async def test_events_outlive_their_gateway(database: Database, other_database: Database) -> None:
    log = await opened_log(database)
    log.record("model_ready", model="m")
    await log.close()
    assert [event.model for event in await store_of(other_database).newest(10)] == ["m"]


async def test_two_gateways_see_each_others_events_once_and_in_one_order(
    database: Database, other_database: Database
) -> None:
    logs_of_both = [await opened_log(database, "g1"), await opened_log(other_database, "g2")]
    readers = [asyncio.create_task(_take(log, 40)) for log in logs_of_both]
    await asyncio.sleep(0)  # both subscribe
    for number in range(20):
        for log in logs_of_both:
            log.record("member_joined", id=f"{log._gateway}-{number}")
        await asyncio.gather(*(log.flush() for log in logs_of_both))
    await asyncio.gather(*(log.flush() for log in logs_of_both))
    first, second = await asyncio.gather(*readers)
    assert first == second
    assert [each["id"] for each in first] == list(range(1, 41))
    assert len({each["message"] for each in first}) == 40


async def _take(log: EventLog, count: int) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    async for event in log.subscribe():
        taken.append(event)
        if len(taken) == count:
            break
    return taken


async def test_pages_after_an_id_have_no_gap_and_no_repetition(database: Database) -> None:
    log, store = await opened_log(database), store_of(database)
    for number in range(25):
        log.record("worker_left", worker=str(number))
    await log.flush()
    seen: list[Event] = []
    while page := await store.after(seen[-1].id if seen else 0, limit=7):
        seen += page
    assert [event.worker for event in seen] == [str(number) for number in range(25)]


async def test_events_are_found_by_kind_severity_and_worker(database: Database) -> None:
    log, store = await opened_log(database), store_of(database)
    log.record("worker_ready", worker="a")
    log.record("worker_lost", worker="a", cause="silent")
    log.record("worker_lost", worker="b", cause="silent")
    await log.flush()
    assert [event.worker for event in await store.newest(10, Wanted(kind="worker_lost"))] == ["a", "b"]
    assert [event.kind for event in await store.newest(10, Wanted(worker="a", severity="error"))] == ["worker_lost"]
    assert [event.worker for event in await store.newest(1)] == ["b"]


async def test_old_events_and_those_beyond_the_most_rows_are_deleted(database: Database) -> None:
    log, store = await opened_log(database), store_of(database, max_rows=3)
    for number in range(10):
        log.record("worker_left", worker=str(number))
    await log.flush()
    await store.clean()
    assert [event.worker for event in await store.after(0)] == ["7", "8", "9"]
    await store_of(database, days=1.0).clean()  # all are of another year
    assert [event.worker for event in await store.after(0)] == ["9"], "the newest stays: its number counts"
    log.record("worker_left", worker="next")
    await log.flush()
    assert [event.id for event in await store.after(10)] == [11]


async def test_a_flood_of_events_is_bounded_and_the_loss_is_counted(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_WAITING", 1_000)
    log, store = await opened_log(database), store_of(database)
    with log.tapping():
        logs.configure("tandem-control", json=True)
        for number in range(10_000):
            log.record("worker_left", worker=str(number))
        await log.flush()
        await log.flush()
    newest = (await store.newest(1))[0]
    assert newest.kind == "events_lost"
    assert newest.fields["num"] == 9_000
    assert newest.id == 1_001


async def test_events_wait_while_the_database_is_away(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    log, store = await opened_log(database), store_of(database)

    async def away(*_: object, **__: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(database, "run", away)
        log.record("worker_left", worker="a")
        await log.flush()
    await log.flush()
    assert [event.worker for event in await store.after(0)] == ["a"]


async def test_an_outage_of_the_database_keeps_what_fits_in_order_and_counts_the_rest(
    postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_WAITING", 1_000)
    logs.configure("tandem-control", json=True)
    database = Database(database_url(postgres_url, Path()))
    await migrate(database)
    log, store = await opened_log(database), store_of(database)
    log.record("worker_left", worker="before")
    await log.flush()
    with log.tapping():
        writing = asyncio.create_task(log.run())
        postgres.stop()
        try:
            for number in range(1_500):
                log.record("worker_left", worker=str(number))
            async with asyncio.timeout(30):
                while not database.problem:  # noqa: ASYNC110 - until it has tried, in vain
                    await asyncio.sleep(0.005)
        finally:
            postgres.start()
        async with asyncio.timeout(30):
            while not (lost := await _lost(store)):  # noqa: ASYNC110 - the database is another process
                await asyncio.sleep(0.005)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    events = await store.after(0) + await store.after(1_000)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert [event.worker for event in events if event.worker] == ["before", *map(str, range(1_000))]
    assert lost >= 500, "the line that the database has failed may be lost, too"
    await database.close()


async def _lost(store: EventStore) -> int:
    """Return the number of lost events, 0 while the database is away or does not know."""
    try:
        return sum(event.fields["num"] for event in await store.newest(10, Wanted(kind="events_lost")))
    except Unavailable:
        return 0


async def test_a_batch_that_the_database_refuses_is_counted_and_the_next_ones_are_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, store = await opened_log(database), store_of(database)

    async def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("the database cannot hold a value")

    with log.tapping():
        logs.configure("tandem-control", json=True)
        with monkeypatch.context() as patch:
            patch.setattr(database, "run", refuse)
            log.record("worker_left", worker="a")
            await log.flush()
        log.record("worker_left", worker="b")
        await log.flush()
    lost, kept = sorted(await store.after(0), key=lambda event: event.kind)
    assert (lost.kind, lost.fields["num"], kept.worker) == ("events_lost", 1, "b")


async def test_a_slow_reader_loses_the_oldest_events_only(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_MAX_UNREAD", 5)
    log = await opened_log(database)
    reader = log.subscribe()
    first = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)  # it subscribes
    for number in range(20):
        log.record("worker_left", worker=str(number))
    await log.flush()
    assert (await first)["worker"] == "15"
    assert [(await anext(reader))["worker"] for _ in range(4)] == ["16", "17", "18", "19"]


async def test_a_line_of_the_log_is_an_event_if_its_name_is_a_kind(database: Database) -> None:
    logs.configure("tandem-control", json=True)
    log, store = await opened_log(database), store_of(database)
    with log.tapping():
        logs.get_logger("control_plane.test").info("member_joined", role="decode", id="ab12")
        logs.get_logger("control_plane.test").info("tokenizer_loaded", model="m", seconds=1.0)
    logs.get_logger("control_plane.test").info("member_joined", role="decode", id="after the block")
    await log.flush()
    (event,) = await store.after(0)
    assert (event.kind, event.message) == ("member_joined", "a decode process has joined the fleet as ab12")
    assert event.fields == {"id": "ab12"}


def test_long_texts_are_cut_and_strange_values_are_written_as_text() -> None:
    event = new_event("probe_failed", 1, {"model": "m", "error": "x" * 10_000, "extra": {"a": object()}})
    assert len(event.message) == MAX_TEXT_CHARACTERS
    assert len(event.fields["error"]) == MAX_TEXT_CHARACTERS
    assert isinstance(event.fields["extra"], str)


@pytest.mark.parametrize("name", ["worker\0name", "\ud800", "wörker", "\x1b[2J", "a\r\nb"])
async def test_any_name_can_be_stored_and_no_name_commands_a_terminal(database: Database, name: str) -> None:
    log = await opened_log(database)
    log.record("worker_left", worker=name, number=2**70)
    await log.flush()
    (event,) = await store_of(database).after(0)
    assert event.worker.isprintable()
    assert event.message.isprintable()


async def test_events_name_workers_as_operators_do_and_are_found_by_id_and_name(database: Database) -> None:
    names = {"ab12": "decode-0", "cd34": "decode-1"}
    log = EventLog("g1", lambda: NOW_MS, lambda worker_id: names.get(worker_id, worker_id))
    store = store_of(database)
    await log.open(store)
    log.record("request_migrated", worker="ab12", to="cd34")
    log.record("worker_joined", worker="ef56", role="kv")
    await log.flush()
    (by_id,), (by_name,) = (
        await store.newest(9, Wanted(worker="ab12")),
        await store.newest(9, Wanted(worker="decode-0")),
    )
    assert by_id == by_name
    assert by_id.message == "an answer went on at decode-1 after decode-0 was lost"
    assert (by_id.worker, by_id.fields["name"], by_id.fields["to"]) == ("ab12", "decode-0", "cd34")
    assert (await store.newest(1))[0].message == "KV service ef56 has joined"


async def test_a_line_that_repeats_is_summed_and_its_greatest_value_is_kept(database: Database) -> None:
    logs.configure("tandem-control", json=True)
    log, store = await opened_log(database), store_of(database)
    with log.tapping():
        for seconds in (0.1, 0.7, 0.2):
            logs.get_logger("control_plane.test").warning("loop_stalled", seconds=seconds, task="t")
        await log.flush()
        assert len(await store.after(0)) == 1, "the sum waits for the end of its window"
    await log.close()
    first, summed = await store.after(0)
    assert (first.fields["seconds"], "repeated" in first.fields) == (0.1, False)
    assert (summed.fields["seconds"], summed.fields["repeated"]) == (0.7, 2)
    assert summed.message == "the gateway's event loop stood still for 0.7 s; 2 such events within 60 s"


async def test_ten_thousand_lines_of_strangers_are_some_events(database: Database) -> None:
    logs.configure("tandem-control", json=True)
    log, store = await opened_log(database), store_of(database)
    with log.tapping():
        for number in range(10_000):
            kind = "Unauthenticated" if number % 2 else f"Strange{number}"
            logs.get_logger("control_plane.test").warning("enrolment_refused", address="a", kind=kind, field="token")
    await log.close()
    events = await store.after(0)
    assert len(events) <= 500
    assert sum(event.fields.get("repeated", 1) for event in events) == 10_000, "all are counted"


async def test_a_writer_that_is_cancelled_repeats_no_event(database: Database) -> None:
    log, store = await opened_log(database), store_of(database)
    for number in range(300):
        log.record("worker_left", worker=str(number))
        writing = asyncio.create_task(log.flush())
        for _ in range(number % 7):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    await log.close()
    assert [event.worker for event in await store.after(0)] == [str(number) for number in range(300)]


def test_every_kind_makes_a_sentence_of_whatever_it_gets() -> None:
    for kind in KINDS:
        assert new_event(kind, 1, {}).message


def test_no_message_names_a_field_that_lines_of_the_log_use_for_themselves() -> None:
    """A line's `service` is the name of the process that wrote it: `{service}` in a message would stay empty."""
    for kind in KINDS.values():
        named = {name for _, name, _, _ in string.Formatter().parse(kind.message) if name}
        assert not named & event_log._NOT_FIELDS, kind.name


def test_an_orphan_in_the_log_becomes_an_event_that_names_where_it_is() -> None:
    logs.configure("tandem-control", json=True)
    log = EventLog("g1", lambda: NOW_MS)
    with log.tapping():
        logs.get_logger("audit").error("kv_orphan", kind="orphaned_region", worker="kv-0", name="r", num_bytes=4096)
    (event,) = log._waiting
    assert (event.message, event.worker) == ("KV memory has no user: 4,096 bytes at kv-0", "kv-0")
    assert event.cause == "orphaned_region"

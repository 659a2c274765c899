"""A call gets its worker's events whatever happens to the stream, and no other call's."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane.fleet import worker_links
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_links import LinkPool, WorkerLink
from tandem.v1 import types_pb2 as pb
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import TandemError, Unavailable
from tests.certificates import Authority
from tests.control_plane.scripted_worker import (
    MODEL,
    AttachStream,
    Behaviour,
    ScriptedWorker,
    lose_after,
    only_accept,
    refuse_with,
    serve,
    silent,
)
from tests.loop_turns import counted_turns


class Heard:
    """A sink that records its events and lets a test wait."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.errors: list[TandemError] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.bug: Exception | None = None

    def accepted(self) -> None:
        self._add("accepted")

    def output(self, output: pb.TokenOutput) -> None:
        if self.bug is not None:
            raise self.bug
        self._add(f"tokens {len(output.token_ids)}")

    def worked(self, ledger: pb.PhaseLedger) -> None:
        self._add(f"worked {ledger.num_computed_tokens}")

    def ended(self, error: TandemError) -> None:
        self.errors.append(error)
        self._add("ended")

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: condition(self.words))

    def _add(self, word: str) -> None:
        self.words.append(word)
        task = asyncio.ensure_future(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def linked(behave: Behaviour = serve) -> AsyncIterator[tuple[ScriptedWorker, WorkerLink, WorkerRegistry]]:
    registry = WorkerRegistry(3.0, 5.0)
    pool = LinkPool(registry, "gateway", "gateway-life")
    scripted = await ScriptedWorker("d", behave=behave).start()
    scripted.register(registry)
    worker = registry.get("d")
    assert worker is not None
    try:
        yield scripted, pool.get(worker), registry
    finally:
        await pool.close()
        await scripted.kill()


def submit(request_id: str = "r-0", attempt: int = 0) -> pb.Submit:
    return pb.Submit(
        request_id=request_id,
        attempt=attempt,
        token_ids=[1, 2],
        num_prompt_tokens=2,
        sampling=pb.SamplingParams(max_tokens=2),
        model=pb.ModelRef(model_id=MODEL),
    )


async def test_words_come_in_order_to_the_request_they_are_for() -> None:
    async with linked() as (_, link, _):
        one, other = Heard(), Heard()
        link.submit(submit("one"), one)
        link.submit(submit("other"), other)
        for heard in (one, other):
            await heard.until(lambda words: len(words) == 3)
            assert heard.words == ["accepted", "tokens 1", "tokens 1"]


async def test_a_worker_that_counts_hears_of_each_eighth_event_and_may_send_several_in_one() -> None:
    async with linked(silent) as (scripted, link, _):
        heard = Heard()
        link.submit(submit(), heard)
        await scripted.until(lambda worker: bool(worker.submits))
        (stream,) = scripted.streams
        assert scripted.hellos[0].counts_events
        stream.events.put_nowait(pb.Event(hello=pb.AttachHello(counts_events=True)))
        accepted = pb.Event(accepted=pb.Accepted(request_id="r-0"))
        step = pb.Event(step=pb.StepBatch(outputs=[pb.TokenOutput(request_id="r-0", token_ids=[7, 8])]))
        stream.events.put_nowait(pb.Event(several=pb.Events(events=[accepted, step, step])))
        for _ in range(16):
            stream.events.put_nowait(step)
        await scripted.until(lambda worker: len(worker.reads) == 2)
        assert [read.num_events for read in scripted.reads] == [8, 16]
        assert heard.words[:3] == ["accepted", "tokens 2", "tokens 2"]


async def test_a_worker_of_the_release_before_is_told_of_no_events() -> None:
    async with linked() as (scripted, link, _):
        for number in range(10):
            heard = Heard()
            link.submit(submit(f"r-{number}"), heard)
            await heard.until(lambda words: len(words) == 3)
        assert scripted.reads == []


async def test_a_refusal_keeps_its_kind_and_its_retry_after() -> None:
    async with linked(refuse_with(Unavailable("loading", retry_after_seconds=2.0))) as (_, link, _):
        heard = Heard()
        link.submit(submit(), heard)
        await heard.until(lambda words: words == ["ended"])
        assert (type(heard.errors[0]), heard.errors[0].retry_after_seconds) == (Unavailable, 2.0)


async def test_a_broken_stream_fails_all_of_its_requests_and_the_next_one_serves() -> None:
    async with linked(lose_after(1)) as (worker, link, _):
        lost, fresh = Heard(), Heard()
        link.submit(submit("lost"), lost)
        await lost.until(lambda words: words[-1:] == ["ended"])
        assert isinstance(lost.errors[0], Unavailable)
        worker.behave = serve
        link.submit(submit("fresh"), fresh)
        await fresh.until(lambda words: len(words) == 3)
        assert [hello.worker_incarnation for hello in worker.hellos] == ["d-life-0"] * 2
        assert [one.request_id for one in worker.submits] == ["lost", "fresh"]  # none was sent twice


async def test_a_worker_that_cannot_be_reached_fails_requests_at_once() -> None:
    async with linked(only_accept) as (worker, link, _):
        heard, late = Heard(), Heard()
        link.submit(submit(), heard)
        await heard.until(lambda words: words == ["accepted"])
        await worker.kill()
        await heard.until(lambda words: words[-1:] == ["ended"])
        link.submit(submit("late"), late)
        await late.until(lambda words: words == ["ended"])


async def test_an_output_that_its_request_cannot_take_costs_that_request_only() -> None:
    async with linked(only_accept) as (worker, link, _):
        broken, good = Heard(), Heard()
        broken.bug = IndexError("a bug of ours")
        link.submit(submit("broken"), broken)
        link.submit(submit("good"), good)
        await worker.until(lambda worker: len(worker.submits) == 2)
        for one in worker.submits:
            worker.streams[0].tokens(one, 2, [5])
        await good.until(lambda words: words == ["accepted", "tokens 1"])
        assert broken.words == ["accepted", "ended"]
        await worker.until(lambda worker: [cancel.request_id for cancel in worker.cancels] == ["broken"])
        assert len(worker.hellos) == 1


async def test_nothing_is_heard_of_a_cancelled_request_even_if_its_answer_was_on_the_way() -> None:
    async def accept_when_cancelled(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        await worker.until(lambda worker: bool(worker.cancels) or submit.request_id == "next")
        await serve(worker, attach, submit)

    async with linked(accept_when_cancelled) as (worker, link, _):
        cancelled, following = Heard(), Heard()
        link.submit(submit("cancelled"), cancelled)
        link.cancel("cancelled", 0)
        link.cancel("cancelled", 0)
        await worker.until(lambda worker: len(worker.cancels) == 1)
        link.submit(submit("next"), following)
        await following.until(lambda words: len(words) == 3)
        assert cancelled.words == []


async def test_late_words_of_one_attempt_are_not_taken_for_the_next() -> None:
    async with linked(silent) as (worker, link, _):
        second = Heard()
        link.submit(submit(attempt=0), Heard())
        link.cancel("r-0", 0)
        link.submit(submit(attempt=1), second)
        await worker.until(lambda worker: len(worker.submits) == 2)
        worker.streams[0].fail(worker.submits[0], Unavailable("the first attempt"))
        worker.streams[0].accept(worker.submits[1])
        await second.until(lambda words: words == ["accepted"])


async def test_a_worker_that_is_gone_fails_its_requests_and_has_no_link() -> None:
    async with linked(silent) as (worker, link, registry):
        heard = Heard()
        link.submit(submit(), heard)
        await worker.until(lambda worker: len(worker.submits) == 1)
        snapshot = registry.get("d")
        registry.deregister("d", worker.incarnation)
        await heard.until(lambda words: words == ["ended"])
        assert snapshot is not None
        with pytest.raises(Unavailable, match="gone"):
            LinkPool(registry, "g", "g").get(snapshot)


async def test_what_a_drained_worker_still_sends_is_read_after_its_goodbye() -> None:
    async with linked(only_accept) as (worker, link, registry):
        heard = Heard()
        link.submit(submit(), heard)
        await worker.until(lambda worker: len(worker.submits) == 1)
        registry.register(worker.info(), worker.load(pb.WORKER_STATE_DRAINING))
        registry.deregister("d", worker.incarnation)
        worker.streams[0].tokens(worker.submits[0], 2, [5, 6])
        worker.streams[0].events.put_nowait(None)
        await heard.until(lambda words: "ended" in words)
        assert heard.words == ["accepted", "tokens 2", "ended"]


async def test_the_requests_of_a_revoked_worker_end_at_once_and_no_stream_is_opened_again(tmp_path: Path) -> None:
    authority = Authority()
    served, ours = authority.member(tmp_path, "decode"), authority.member(tmp_path, "gateway")
    registry = WorkerRegistry(3.0, 5.0)
    pool = LinkPool(registry, "gateway", "gateway-life", ours)
    scripted = await ScriptedWorker(served.identity.id, behave=only_accept, member=served).start()
    scripted.register(registry)
    worker = registry.get(served.identity.id)
    assert worker is not None
    link, before, after = pool.get(worker), Heard(), Heard()
    link.submit(submit("before"), before)
    await before.until(lambda words: words == ["accepted"])
    ours.denied.apply(1, [served.identity.id])
    async with asyncio.timeout(2):
        await before.until(lambda words: words == ["accepted", "ended"])
    assert isinstance(before.errors[0], Unavailable) and "is revoked" in before.errors[0].message
    link.submit(submit("after"), after)
    await after.until(lambda words: words == ["ended"])
    assert len(scripted.streams) == 1
    await pool.close()
    await scripted.kill()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_link_to_a_worker_that_is_gone_is_freed_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    """A rack that restarts leaves hundreds of links; a collection over all their objects would stop every stream."""
    authority = Authority()
    served = authority.member(tmp_path, "decode") if is_encrypted else None
    ours = authority.member(tmp_path, "gateway") if is_encrypted else None
    opened: list[weakref.ref[Any]] = []

    def open_channel(info: pb.WorkerInfo, member: Any, most_unread_bytes: int) -> Any:
        channel: Any = open_worker_channel(info, member, most_unread_bytes)
        opened.extend((weakref.ref(channel), weakref.ref(channel._channel)))
        return channel

    monkeypatch.setattr(worker_links, "open_worker_channel", open_channel)
    registry = WorkerRegistry(3.0, 5.0)
    pool = LinkPool(registry, "gateway", "gateway-life", ours)
    scripted = await ScriptedWorker(served.identity.id if served else "d", member=served).start()
    scripted.register(registry)
    (worker,) = registry.workers()
    gc.collect()
    gc.disable()
    try:
        link, heard = pool.get(worker), Heard()
        link.submit(submit(), heard)
        await heard.until(lambda words: len(words) == 3)
        opened.append(weakref.ref(link))
        del link
        registry.deregister(worker.worker_id, worker.incarnation)
        async with asyncio.timeout(10):
            while pool._closing:  # noqa: ASYNC110 - gRPC's own tasks follow
                await asyncio.sleep(0.005)
            while any(each() is not None for each in opened):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.005)
    finally:
        gc.enable()
        await pool.close()
        await scripted.kill()
    assert len(opened) == 3


async def test_streams_to_workers_that_come_back_at_once_are_opened_one_in_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A channel takes a millisecond of the loop; a rack that restarts has hundreds of workers."""
    opened: dict[str, int] = {}
    all_opened = asyncio.Event()

    def open_channel(info: pb.WorkerInfo, member: object, most_unread_bytes: int) -> Any:
        opened.setdefault(info.worker_id, turns.now)
        if len(opened) == 50:
            all_opened.set()
        raise Unavailable("nobody is there")

    monkeypatch.setattr(worker_links, "open_worker_channel", open_channel)
    registry = WorkerRegistry(3.0, 5.0)
    pool = LinkPool(registry, "gateway", "gateway-life")
    with counted_turns() as turns:
        for number in range(50):
            ScriptedWorker(f"w-{number}").register(registry)
        async with asyncio.timeout(10):
            await all_opened.wait()
    assert list(opened) == [f"w-{number}" for number in range(50)]
    assert len(set(opened.values())) == 50
    await pool.close()


async def test_only_workers_that_write_tokens_have_a_link() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    pool = LinkPool(registry, "gateway", "gateway-life")
    try:
        for name, role in (("k", pb.WORKER_ROLE_KV), ("e", pb.WORKER_ROLE_ENCODE)):
            info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1", role=role, address="127.0.0.1:1")
            registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))
            worker = registry.get(name)
            assert worker is not None
            with pytest.raises((KeyError, TandemError)):
                pool.get(worker)
    finally:
        await pool.close()


async def test_a_link_has_the_card_that_its_worker_registers_once_its_model_is_loaded() -> None:
    registry, worker = WorkerRegistry(3.0, 5.0), await ScriptedWorker("d").start()
    links = LinkPool(registry, "gateway", "gateway-life")
    try:
        loaded = worker.info()
        loading = pb.WorkerInfo()
        loading.CopyFrom(loaded)
        loading.ClearField("card")
        registry.register(loading, pb.LoadReport(state=pb.WORKER_STATE_LOADING), 1)
        (registered,) = registry.workers()
        link = links.get(registered)
        registry.register(loaded, worker.load(), 2)
        assert links.get(registered) is link
        assert link.worker.info.card.fingerprint.numerics_class == worker.numerics_class != ""
    finally:
        await links.close()
        await worker.kill()


async def test_the_end_of_an_old_stream_does_not_detach_a_worker_that_has_moved() -> None:
    registry, worker = WorkerRegistry(3.0, 5.0), await ScriptedWorker("d").start()
    links, attached = LinkPool(registry, "gateway", "gateway-life"), asyncio.Queue[Worker]()
    links.listen_to_attached(attached.put_nowait)
    try:
        async with asyncio.timeout(10):
            worker.register(registry)
            link = links.get(await attached.get())
            assert set(links.attached) == {worker.incarnation}
            moved = worker.info()
            moved.host_id = "another"
            registry.register(moved, worker.load(), 1)
            assert not links.attached, "the new stream is not open yet"
            assert links.get(await attached.get()) is not link
            await link.close()
            assert set(links.attached) == {worker.incarnation}
    finally:
        await links.close()
        await worker.kill()
    assert not links.attached

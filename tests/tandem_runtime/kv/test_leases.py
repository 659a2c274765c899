from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tandem_runtime.kv.leases import LeaseKeeper
from tandem_runtime.kv_handle import HandleState


class Service:
    """Answers renewals with the states it was given, and AWAITED for what it does not know."""

    def __init__(self) -> None:
        self.states: dict[bytes, HandleState | None] = {}
        self.asked: asyncio.Queue[tuple[str, list[bytes]]] = asyncio.Queue()
        self.lost: list[tuple[bytes, str, HandleState]] = []
        self.failures: list[Exception] = []

    async def renew(self, handles: Sequence[pb.KvHandle], reader_id: str) -> list[HandleState | None]:
        self.asked.put_nowait((reader_id, [handle.handle_id for handle in handles]))
        if self.failures:
            raise self.failures.pop(0)
        return [self.states.get(handle.handle_id, HandleState.AWAITED) for handle in handles]

    def on_lost(self, handle: pb.KvHandle, reader_id: str, state: HandleState) -> None:
        self.lost.append((handle.handle_id, reader_id, state))


def handle(name: bytes, seconds: float = 60.0) -> pb.KvHandle:
    return pb.KvHandle(handle_id=name, deadline_unix_ms=int((time.time() + seconds) * 1000))


async def test_what_is_held_is_renewed_until_it_is_let_go() -> None:
    service = Service()
    service.states = {b"1": HandleState.FILLING, b"2": HandleState.FILLING}
    keeper = LeaseKeeper(service.renew, service.on_lost, 0.005)
    keeper.hold(handle(b"1"), "")
    keeper.hold(handle(b"2"), "")
    for _ in range(2):
        assert await service.asked.get() == ("", [b"1", b"2"])
    keeper.let_go(handle(b"1"), "")
    while (await service.asked.get())[1] != [b"2"]:
        pass
    assert service.lost == []
    await keeper.close()


async def test_a_writer_learns_what_has_ended_or_was_forgotten() -> None:
    service = Service()
    service.states = {b"over": HandleState.RELEASED}
    keeper = LeaseKeeper(service.renew, service.on_lost, 0.005)
    keeper.hold(handle(b"over"), "")
    keeper.hold(handle(b"forgotten"), "")
    while len(service.lost) < 2:
        await service.asked.get()
    assert service.lost == [(b"over", "", HandleState.RELEASED), (b"forgotten", "", HandleState.AWAITED)]
    await keeper.close()


async def test_a_reader_holds_what_is_not_reserved_yet_but_not_past_its_deadline() -> None:
    service = Service()
    keeper = LeaseKeeper(service.renew, service.on_lost, 0.005)
    keeper.hold(handle(b"to come"), "r")
    keeper.hold(handle(b"too late", seconds=-1), "r")
    while (await service.asked.get())[1] != [b"to come"]:
        pass
    assert service.lost == [(b"too late", "r", HandleState.AWAITED)]
    await keeper.close()


async def test_a_service_that_is_away_loses_no_leases() -> None:
    service = Service()
    service.failures = [Unavailable("away")] * 3
    keeper = LeaseKeeper(service.renew, service.on_lost, 0.005)
    keeper.hold(handle(b"1"), "")
    for _ in range(3):
        assert await service.asked.get() == ("", [b"1"])
    assert service.lost == []
    await keeper.close()


async def test_renewals_go_on_after_a_failure_that_nobody_expected() -> None:
    service = Service()
    service.failures = [ValueError("99 is not a valid HandleState"), RuntimeError("a defect")]
    keeper = LeaseKeeper(service.renew, service.on_lost, 0.005)
    keeper.hold(handle(b"1"), "r")
    for _ in range(4):
        assert await asyncio.wait_for(service.asked.get(), 10) == ("r", [b"1"])
    assert service.lost == []
    await keeper.close()


async def test_renewals_go_on_after_whoever_hears_of_a_loss_has_failed() -> None:
    service, heard = Service(), []
    service.states = {b"over": HandleState.RELEASED}

    def on_lost(handle: pb.KvHandle, reader_id: str, state: HandleState) -> None:
        heard.append(handle.handle_id)
        raise RuntimeError("a defect of the owner")

    keeper = LeaseKeeper(service.renew, on_lost, 0.005)
    keeper.hold(handle(b"over"), "")
    keeper.hold(handle(b"1"), "r")
    while (await asyncio.wait_for(service.asked.get(), 10)) != ("r", [b"1"]) or not heard:
        pass
    for _ in range(2):
        assert await asyncio.wait_for(service.asked.get(), 10) == ("r", [b"1"])
    assert heard == [b"over"]
    await keeper.close()


async def test_a_lease_in_a_state_of_a_newer_version_is_kept_and_the_others_are_judged() -> None:
    service = Service()
    service.states = {b"newer": None, b"over": HandleState.EXPIRED}
    keeper = LeaseKeeper(service.renew, service.on_lost, 0.005)
    for name in (b"newer", b"over"):
        keeper.hold(handle(name), "r")
    while (await asyncio.wait_for(service.asked.get(), 10))[1] != [b"newer"]:
        pass
    assert service.lost == [(b"over", "r", HandleState.EXPIRED)]
    assert HandleState.of(99) is None and HandleState.of(int(HandleState.SEALED)) is HandleState.SEALED
    await keeper.close()

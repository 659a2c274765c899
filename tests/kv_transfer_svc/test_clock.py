"""Leases survive a service that slept, and handles survive clocks that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_transfer_svc.blocks.allocator import BlockAllocator
from kv_transfer_svc.clock import ServiceClock
from kv_transfer_svc.host_cache import HostCache
from kv_transfer_svc.store import HandleStore
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import DeadlineExceeded, KvNotFound
from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.host import a_client, nothing_is_left, running_host, running_writer, until
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_host_cache import chain, published, wanted

HOUR = 3600.0


class Machine:
    """A monotonic clock that a test moves on."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_the_clock_leaves_out_the_time_in_which_nobody_could_read_it() -> None:
    machine = Machine()
    clock = ServiceClock(machine, lambda: 1_000_000.0)
    assert clock() == 1_000_000.0
    machine.seconds += 0.25
    assert clock() == 1_000_000.25
    machine.seconds += 15.0  # stopped
    assert clock() == clock() == 1_000_000.25
    machine.seconds += 1.0  # late, but running
    assert clock() == clock.unread == 1_000_001.25


async def test_a_service_that_slept_ends_no_handle_and_no_lease_before_the_renewals_can_come(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        machine = Machine()
        clock = ServiceClock(machine)
        store = HandleStore(clock=clock)
        cache = HostCache(BlockAllocator(1 << 20), None, host.store.regions, "store", clock)
        # 1. A handle that is being filled, and a lease on stored blocks.
        store.regions = host.store.regions
        handle = writer.handle()
        record = store.reserve(
            kv.ReserveRequest(handle=handle, region_id=writer.region_id, layout=a_layout(), lease_ms=10_000)
        )
        await cache.publish(published(writer, chain(2), [0, 1]))
        load = wanted(chain(2))
        load.lease_ms = 10_000
        assert len((await cache.load(load)).blocks) == 2
        # 2. Asleep for 15 s: longer than both leases. The first sweep comes before any renewal.
        machine.seconds += 15.0
        for sweep in (store.sweep, cache.sweep):
            sweep()
        assert not record.machine.ended
        assert cache.blocks.stats().leased_bytes == 2 * BLOCK_BYTES
        # 3. Awake and not renewed for as long: both end.
        for _ in range(41):
            machine.seconds += 0.25
            store.sweep()
            cache.sweep()
        assert record.machine.state is HandleState.EXPIRED
        assert cache.blocks.stats().leased_bytes == 0
        await cache.close()


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
async def test_a_service_whose_clock_is_wrong_moves_handles_by_their_time_left(tmp_path: Path, ahead: float) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        host.wall_clock_ahead = ahead
        handle = writer.handle(seconds=30.0)
        await writer.client.reserve(handle, writer.region_id, a_layout(), 30.0)
        deadline = host.store.find(handle).machine.deadline
        assert 0 < deadline - host.clock() <= 30.0
        watching = reader.watch(handle, "r", a_layout(), seconds_left=30.0)
        await writer.client.seal(handle, [writer.slab(0, 0, [0, 1, 2, 3])])
        assert (await anext(watching)).HasField("slab")
        await watching.aclose()
        await reader.release_all(handle, 30.0)
        await until(lambda: nothing_is_left(host))


async def test_an_end_that_overtakes_the_reservation_is_kept_by_its_time_left(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as gateway:
        host.wall_clock_ahead = HOUR
        handle = writer.handle(seconds=30.0)
        assert await gateway.release_all(handle, 30.0) is HandleState.RELEASED
        assert host.store.find(handle).machine.state is HandleState.RELEASED


async def test_a_late_end_is_kept_for_calls_that_were_sent_before_it(tmp_path: Path) -> None:
    async with running_host(tmp_path) as host, running_writer(host) as writer, a_client(host) as reader:
        handle = writer.handle(seconds=30.0, num_readers=2)
        assert await reader.release(handle, "r", 0.0) is HandleState.AWAITED
        with pytest.raises(KvNotFound, match="has released it"):
            await anext(reader.watch(handle, "r", a_layout(), seconds_left=0.1))
        # Past the deadline that its sender states, a call gets the same answer with a record and without.
        with pytest.raises(DeadlineExceeded):
            await writer.client.reserve(handle, writer.region_id, a_layout(), 0.0)
        assert host.store.find(handle).machine.state is HandleState.AWAITED


async def test_a_clock_that_is_put_right_is_believed_without_a_restart(tmp_path: Path) -> None:
    """Messages of release 0.2 state no time left."""
    async with running_host(tmp_path) as host, running_writer(host) as writer:
        host.wall_clock_ahead = HOUR
        with pytest.raises(DeadlineExceeded):
            await writer.client.reserve(writer.handle(), writer.region_id, a_layout())
        host.wall_clock_ahead = 0.0
        handle = writer.handle(seconds=30.0)
        await writer.client.reserve(handle, writer.region_id, a_layout())
        assert host.store.find(handle).machine.deadline - host.clock() <= 30.5

"""The invariants of the system: after every step, and at rest."""

from __future__ import annotations

from collections import Counter

from kv_transfer_svc.handle_record import HandleRecord
from tandem_engine.scheduling.request import RequestState
from tandem_engine.staging import StagedPublisher
from tests.kv_transfer_svc.simulation.fleet import Fleet
from tests.kv_transfer_svc.simulation.gateway import DEADLINE_SLACK_SECONDS, Gateway
from tests.kv_transfer_svc.simulation.lives import SWEEP_SECONDS, Environment, KvLife, WorkerLife
from tests.kv_transfer_svc.simulation.truth import Violation
from tests.kv_transfer_svc.simulation.watched_machine import WatchedMachine

_SWEEP_SLACK_SECONDS = SWEEP_SECONDS + 0.01


def check_step(around: Environment, fleet: Fleet, gateway: Gateway) -> None:
    """Raise Violation unless the whole system is in a legal state."""
    around.truth.raise_if_violated()
    if around.loop.broken:
        raise Violation(f"uncaught: {around.loop.broken}")
    for worker in fleet.workers:
        if worker.is_ready:
            _check_pool(worker)
            _check_held_slots(worker)
    for service in fleet.kv_services:
        if service.is_ready:
            _check_service(around, service)
    now = around.time.time()
    for request in gateway.requests.values():
        _ensure(now < request.deadline + DEADLINE_SLACK_SECONDS, f"{request.name} waits past its deadline")


def check_rest(around: Environment, fleet: Fleet, gateway: Gateway) -> None:
    """Raise Violation if anything is left of any request."""
    check_step(around, fleet, gateway)
    _ensure(not gateway.requests, f"requests never ended: {sorted(gateway.requests)}")
    for worker in fleet.workers:
        _check_worker_at_rest(around, worker)
    for service in fleet.kv_services:
        _check_service_at_rest(service)
    for client in gateway.kv_clients._clients.values():
        _ensure(not client._leases._held, "the gateway renews a lease")


def _ensure(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def _check_pool(worker: WorkerLife) -> None:
    """free + cached + used = total, and each block's reference count is the number of tables that contain the block."""
    scheduler, name = worker.engine.core.scheduler, worker.info.incarnation
    pool = scheduler.pool
    try:
        pool.check()
    except AssertionError as error:
        raise Violation(f"{name}: {error}") from error
    total = pool.num_free + pool.num_cached + pool.num_used
    _ensure(total == pool.num_blocks, f"{name}: {total} blocks of {pool.num_blocks}")
    references = Counter(block for request in scheduler._requests.values() for block in request.block_table)
    counted = {block: count for block, count in enumerate(pool._references) if count}
    _ensure(references == counted, f"{name}: reference counts differ from the block tables")


def _check_held_slots(worker: WorkerLife) -> None:
    """Slots held for readers have not been reused."""
    generations = worker.engine.runner.slot_generations
    for request_id, _ in worker.holds.values():
        held = worker.sealed.get(request_id, [])[worker.engine.num_released.get(request_id, 0) :]
        is_kept = all(generations[slot] == generation for slot, generation in held)
        _ensure(is_kept, f"{worker.info.incarnation}: a slot of {request_id} was reused while it is held for readers")


def _check_service(around: Environment, service: KvLife) -> None:
    name, store, arena = service.info.incarnation, service.store, service.arena
    _ensure(arena.free_bytes + arena.used_bytes == arena.total_bytes, f"{name}: the arena lost pages")
    blocks = service.cache.blocks
    try:
        blocks.check()
    except AssertionError as error:
        raise Violation(f"{name}: {error}") from error
    stats = blocks.stats()
    parts = stats.free_bytes + stats.cached_bytes + stats.leased_bytes + stats.filling_bytes
    _ensure(parts == stats.total_bytes, f"{name}: free + cached + leased + filling is {parts}")
    _ensure(not any(record.machine.ended for record in store._live), f"{name}: a handle has ended and is still kept")
    for record in store._records.values():
        _check_fences(service, record)
    process = service.process
    if process.is_running and around.loop.time() > process.woken_at + _SWEEP_SLACK_SECONDS:
        _check_held(service, service.clock.unread)


def _check_fences(service: KvLife, record: HandleRecord) -> None:
    """No record belongs to another incarnation of this service or comes from another incarnation of the writer."""
    name, handle = service.info.incarnation, record.handle
    _ensure(handle.holder_incarnation == name, f"{name} keeps a handle of {handle.holder_incarnation}")
    writer = f"pool-{handle.prefill_incarnation}"
    _ensure(record.region_id in ("", writer), f"{name}: a handle for {writer} was reserved by {record.region_id}")


def _check_held(service: KvLife, now: float) -> None:
    """A running service keeps only what is within its lease, and every used page of the arena belongs to a pull."""
    name, pulls = service.info.incarnation, service.service.puller._pulls
    for record in service.store._live:
        machine = record.machine
        assert isinstance(machine, WatchedMachine), "the harness replaces the real machine"
        late = now - machine.rightful_until
        _ensure(late <= _SWEEP_SLACK_SECONDS, f"{name}: {machine.name} is kept {late:.2f} s past its lease")
        for reader in machine._leases:
            has_right = machine.has_right(reader, now - _SWEEP_SLACK_SECONDS)
            _ensure(has_right, f"{name}: {machine.name} is lent to {reader}, past its lease")
    held_bytes = sum(pull.num_arena_bytes for pull in pulls.values())
    _ensure(held_bytes == service.arena.used_bytes, f"{name}: arena pages belong to no pull")
    orphans = sum(r.num_bytes for r in service.store._live if r.machine.lease_until < now - 1.0)
    _ensure(orphans == 0, f"{name}: {orphans} orphaned bytes")


def _check_worker_at_rest(around: Environment, worker: WorkerLife) -> None:
    name, scheduler = worker.info.incarnation, worker.engine.core.scheduler
    held = [request.request_id for request in scheduler._requests.values() if request.state is RequestState.HELD]
    _ensure(not held, f"{name} still holds the blocks of {held}")
    _ensure(not scheduler._requests, f"{name} still has requests {sorted(scheduler._requests)}")
    _ensure(scheduler.pool.num_used == 0, f"{name}: {scheduler.pool.num_used} blocks are in use")
    _ensure(not len(worker.front._requests), f"{name}: the front still has requests")
    holds = worker.holds
    _ensure(not holds, f"{name}: blocks are held for {len(holds)} handles")
    publisher = worker.engine.core.publisher
    if isinstance(publisher, StagedPublisher):
        publisher.ring.check()
        _ensure(not publisher.ring.num_held, f"{name}: {publisher.ring.num_held} slots of the ring are held")
        _ensure(not publisher.state["staging_blocks_waiting"], f"{name}: blocks wait for slots of the ring")
        around.truth.counts["blocks staged"] += int(publisher.state["blocks_staged"])
        around.truth.counts["slabs' slots given back early"] += len(worker.engine.num_released)
    if (connection := worker.link._connection) is not None:
        _ensure(not connection.client._leases._held, f"{name} still renews {connection.client._leases._held}")


def _check_service_at_rest(service: KvLife) -> None:
    name, store = service.info.incarnation, service.store
    _ensure(not store.num_live, f"{name} still keeps {[record.machine.name for record in store._live]}")
    _ensure(not store._copies, f"{name} still has copies")
    _ensure(not store._records, f"{name} remembers {len(store._records)} handles past their deadline")
    _ensure(store.orphan_bytes == 0, f"{name}: {store.orphan_bytes} orphaned bytes")
    _ensure(service.arena.used_bytes == 0, f"{name}: {service.arena.used_bytes} bytes of the arena are in use")
    stats = service.cache.blocks.stats()
    _ensure(not stats.num_leases and not stats.filling_bytes, f"{name}: stored blocks are lent or being filled")
    _ensure(not service.service.puller._pulls, f"{name}: pulls never end")

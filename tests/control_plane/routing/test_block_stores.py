"""What a worker finds of a prompt: in its own pool, then in its host's store, then in the store that has the most."""

from __future__ import annotations

import pytest

from control_plane.fleet.registry import WorkerRegistry
from control_plane.fleet.worker_figures import WorkerFigures
from control_plane.routing.block_stores import BlockStores
from control_plane.routing.prefix_index import CachedPrefix, PrefixMatch
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb

GRAIN, NUM_TOKENS, RATE = 16, 1_000, 1_000.0
MATCH = PrefixMatch({"a-1": 2, "c-1": 8}, {"host-a": 4, "host-c": 8})


class Harness:
    """Hosts with a KV service each."""

    def __init__(self, *hosts: str) -> None:
        self.now = 100.0
        self.registry = WorkerRegistry(5.0, 15.0, lambda: self.now)
        self.stores = BlockStores(self.registry, lambda: self.now)
        for host in hosts:
            self.kv(host)

    def kv(self, host: str, name: str = "", *, has_store: bool = True) -> None:
        """Register a KV service."""
        name = name or f"kv-{host}"
        info = pb.WorkerInfo(worker_id=name, incarnation=f"{name}-1", role=pb.WORKER_ROLE_KV, host_id=host)
        info.address = f"{name}:1"
        self.registry.register(info, _load(has_store))

    def report(self, host: str, *, has_store: bool = True, state: pb.WorkerState.ValueType | None = None) -> None:
        load = _load(has_store)
        load.state = load.state if state is None else state
        self.registry.heartbeat(cp.HeartbeatRequest(worker_id=f"kv-{host}", incarnation=f"kv-{host}-1", load=load))

    def found(self, incarnation: str, host: str, match: PrefixMatch = MATCH) -> CachedPrefix:
        """Return what a worker finds."""
        caches = self.stores.caches(self.stores.usable(match), GRAIN, NUM_TOKENS)
        assert caches is not None
        cached, num_missing, _ = caches.of(incarnation, _figures(host), RATE)
        assert num_missing == NUM_TOKENS - cached.own - cached.host - cached.remote
        return cached


def _load(has_store: bool) -> pb.LoadReport:
    service = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1)) if has_store else pb.KvServiceLoad()
    return pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=service)


def _figures(host: str) -> WorkerFigures:
    info = pb.WorkerInfo(worker_id="w", host_id=host)
    registry = WorkerRegistry(5.0, 15.0, lambda: 0.0)
    registry.register(info, pb.LoadReport(kv=pb.KvPool(tokens_per_block=GRAIN, bytes_per_block=GRAIN * 1_000)))
    worker = registry.get("w")
    assert worker is not None
    return worker.figures


def test_a_run_is_counted_in_the_pool_then_on_the_host_then_elsewhere() -> None:
    harness = Harness("host-a", "host-b", "host-c")
    far = ("host-c", "kv-host-c:1", "kv-host-c")
    assert harness.found("a-1", "host-a") == CachedPrefix(32, 32, 64, *far)
    assert harness.found("c-1", "host-c") == CachedPrefix(own=128)
    assert harness.found("c-2", "host-c") == CachedPrefix(host=128)
    assert harness.found("new", "host-b") == CachedPrefix(0, 0, 128, *far)
    assert harness.found("elsewhere", "host-without-a-store") == CachedPrefix()
    assert harness.stores.caches(PrefixMatch(), GRAIN, NUM_TOKENS) is None


def test_what_takes_longer_to_fetch_than_to_compute_is_computed() -> None:
    harness = Harness("host-a", "host-c")
    caches = harness.stores.caches(MATCH, GRAIN, NUM_TOKENS)
    assert caches is not None
    far = ("host-c", "kv-host-c:1", "kv-host-c")
    fetch_ms = 2.0 + 1000.0 * 64 * 1_000 / 1e9  # 64 tokens of 1,000 bytes each, over an assumed link
    for computes_in_ms, cached in (
        (1.01 * fetch_ms, CachedPrefix(0, 64, 64, *far)),
        (0.99 * fetch_ms, CachedPrefix(0, 64, 0)),
    ):
        found, num_missing, load_ms = caches.of("new", _figures("host-a"), 64_000 / computes_in_ms)
        assert (found, num_missing) == (cached, NUM_TOKENS - 64 - cached.remote)
        assert load_ms == pytest.approx(0.0128 + (fetch_ms if cached.remote else 0.0))


def test_a_store_counts_while_its_service_may_be_used_and_says_that_it_has_one() -> None:
    harness = Harness("host-a", "host-b", "host-c")

    def is_read() -> bool:
        found = harness.found("new", "host-b", PrefixMatch({}, {"host-c": 8, "host-a": 1}))
        assert found.remote_host == ("host-c" if found.remote == 128 else "host-a")
        return found.remote == 128

    assert is_read()
    harness.report("host-c", has_store=False)
    assert not is_read()
    harness.report("host-c")
    assert is_read()
    harness.report("host-c", state=pb.WORKER_STATE_DRAINING)
    assert not is_read()
    harness.report("host-c")
    harness.kv("host-c", "successor", has_store=False)  # the newest service of a host counts
    assert not is_read()
    harness.registry.deregister("successor", "successor-1")
    assert is_read()
    for _ in range(7):
        harness.now += 1.0
        for host in ("host-a", "host-b"):
            harness.report(host)
        harness.registry.sweep()
    assert not is_read()
    harness.report("host-c")
    assert is_read()
    harness.registry.deregister("kv-host-c", "kv-host-c-1")
    assert not is_read()


def test_what_a_host_had_is_forgotten_with_its_last_worker() -> None:
    harness = Harness("host-a", "host-b")
    harness.stores.used("host-a", 800, 0)
    assert harness.stores.hit_rate("host-a") == pytest.approx(0.8)
    harness.stores.used("host-a", 0, 0)  # nothing was expected
    assert harness.stores.hit_rate("host-a") == pytest.approx(0.8)
    harness.registry.deregister("kv-host-a", "kv-host-a-1")
    assert harness.stores.hit_rate("host-a") == 1.0

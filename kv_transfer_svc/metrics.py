"""Exports the handles, the arena and the block store of a KV service, from its latest load report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.metrics import CallbackOptions, Observation

from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics
from tandem_runtime.kv_handle import HandleState

_LIVE_STATES = ("reserved", "filling", "sealed", "leased")
_CHANGES = ("reserved", "sealed", "released", "aborted", "expired")

Read = Callable[[pb.LoadReport], Iterable[Observation]]


def export(report: Callable[[], pb.LoadReport], states: Callable[[], Iterable[HandleState]]) -> None:
    """Export `report` and the `states` of the live handles. Both are called in any thread."""
    meter = metrics.meter()

    def observed(read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda options: read(report())

    def handles(options: CallbackOptions) -> Iterable[Observation]:
        counted = Counter(state.name.lower() for state in states())
        return [Observation(counted[state], {"state": state}) for state in _LIVE_STATES]

    meter.create_observable_gauge("tandem.kv.handles", [handles], "{handle}", "Live handles, by state.")
    for name, unit, description, read in _GAUGES:
        meter.create_observable_gauge(f"tandem.kv.{name}", [observed(read)], unit, description)
    for name, unit, description, read in _COUNTERS:
        meter.create_observable_counter(f"tandem.kv.{name}", [observed(read)], unit, description)


def _arena(report: pb.LoadReport) -> Iterator[Observation]:
    load = report.kv_service
    yield Observation(load.arena_free_bytes, {"state": "free"})
    yield Observation(load.arena_bytes - load.arena_free_bytes, {"state": "used"})


def _leased(report: pb.LoadReport) -> Iterator[Observation]:
    yield Observation(report.kv_service.leased_bytes)


def _store_sizes(report: pb.LoadReport) -> Iterator[Observation]:
    if not report.kv_service.HasField("store"):
        return
    store = report.kv_service.store
    memory = {
        "free": store.free_bytes,
        "cached": store.cached_bytes,
        "leased": store.leased_bytes,
        "filling": store.filling_bytes,
    }
    for state, num_bytes in memory.items():
        yield Observation(num_bytes, {"tier": "memory", "state": state})
    if store.disk_budget_bytes:
        yield Observation(store.disk_bytes, {"tier": "disk", "state": "used"})
        yield Observation(max(0, store.disk_budget_bytes - store.disk_bytes), {"tier": "disk", "state": "free"})


def _changes(report: pb.LoadReport) -> Iterator[Observation]:
    for state in _CHANGES:
        yield Observation(report.counters.get(f"handles_{state}", 0.0), {"state": state})


def _tiers(report: pb.LoadReport) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield each tier that there is, with its counters."""
    counters = dict(report.counters)  # reading an absent key of a protobuf map would add it
    if "store_hits" in counters:
        yield "memory", {name: counters[f"store_{name}"] for name in ("hits", "misses", "evictions", "memory_corrupt")}
    if "disk_hits" in counters:
        yield "disk", {name: counters[f"disk_{name}"] for name in ("hits", "misses", "evicted", "corrupt")}


def _of_tiers(*names: str) -> Read:
    """Return a reading of the sum of `names` for each tier; a tier counts those that it has."""

    def read(report: pb.LoadReport) -> Iterator[Observation]:
        for tier, counters in _tiers(report):
            yield Observation(sum(counters.get(name, 0.0) for name in names), {"tier": tier})

    return read


def _of(counter: str) -> Read:
    def read(report: pb.LoadReport) -> Iterator[Observation]:
        if counter in report.counters:
            yield Observation(report.counters[counter])

    return read


def _refused(report: pb.LoadReport) -> Iterator[Observation]:
    if "store_refused" in report.counters:
        over_quota = report.counters["store_refused_over_quota"]
        yield Observation(report.counters["store_refused"], {"reason": "memory"})
        yield Observation(over_quota, {"reason": "quota"})


_GAUGES: tuple[tuple[str, str, str, Read], ...] = (
    ("arena.size", "By", "Memory for KV pulled from other hosts, by state.", _arena),
    ("leased", "By", "Bytes that readers hold.", _leased),
    ("store.size", "By", "Bytes of the block store, by tier and state.", _store_sizes),
)
_COUNTERS: tuple[tuple[str, str, str, Read], ...] = (
    ("handle_changes", "{handle}", "Handles that reached a state.", _changes),
    ("store.lookups", "{block}", "Blocks asked for.", _of_tiers("hits", "misses")),
    ("store.hits", "{block}", "Blocks found.", _of_tiers("hits")),
    ("store.evictions", "{block}", "Blocks forgotten for lack of room.", _of_tiers("evictions", "evicted")),
    ("store.corrupt", "{block}", "Blocks whose checksum did not match.", _of_tiers("memory_corrupt", "corrupt")),
    ("store.stored", "{block}", "Blocks taken into memory.", _of("store_stored")),
    ("store.refused", "{block}", "Blocks not taken.", _refused),
    ("checksum_failures", "{block}", "Blocks of other hosts whose checksum did not match.", _of("checksum_failures")),
    ("served", "By", "Bytes sent to other KV services and to workers over gRPC.", _of("bytes_served")),
    ("pulled", "By", "Bytes pulled from other KV services.", _of("bytes_pulled")),
)

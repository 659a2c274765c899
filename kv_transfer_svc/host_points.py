"""Keeps which sample points this host's store and the pools of its workers have, and tells readers of the changes.

    StoredPoints ─┐                        ┌─▶ PointReader: pending changes ─▶ batches of one stream
    pool reports ─┴─▶ HostPoints: sets ────┤
                                           └─▶ PointReader …

A reader that falls behind is sent everything again. Nothing here waits or knows gRPC's streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kv_transfer_svc.handle_record import Broadcast
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_engine.scheduling.sample_points import NUM_KEY_BYTES
from tandem_runtime.errors import InvalidRequest, StaleIncarnation

STORE = ""
"""The place of the host's store; other places are incarnations of workers."""
_MAX_PENDING = 200_000
_MAX_INCARNATION = 128
_MAX_HEARTBEAT_BYTES = 32_768
_MAX_HEARTBEATS = 512
"""Workers of a host."""
_MAX_POINTS_OF_POOL = 1_000_000
"""A pool has a point for each of its blocks at most; of a prompt of 125 blocks it has 13."""
_BYTES_PER_BATCH = 4_096 * NUM_KEY_BYTES
"""A snapshot of more comes in several messages."""


class HostPoints:
    """The sample points of each place of this host. Its writers: the store, and the reports of workers."""

    def __init__(self) -> None:
        self.changed = Broadcast()
        self._places: dict[str, set[bytes]] = {STORE: set()}
        self._readers: set[PointReader] = set()
        self._reports: dict[str, PoolReports] = {}
        """The latest stream that reports each pool."""

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def points_of(self, incarnation: str) -> Collection[bytes]:
        """Return the points of a place; none for a place that is unknown."""
        return self._places.get(incarnation, frozenset())

    def items(self) -> Iterator[tuple[str, Collection[bytes]]]:
        return iter(self._places.items())

    def change(self, incarnation: str, stored: Collection[bytes], evicted: Collection[bytes]) -> None:
        """Take in changes of a place; a new one is known from then on, with no points if there are none."""
        is_new = incarnation not in self._places
        points = self._places.setdefault(incarnation, set())
        evicted = [key for key in evicted if key in points]
        stored = [key for key in stored if key not in points]
        points.difference_update(evicted)
        points.update(stored)
        if is_new or stored or evicted:
            for reader in self._readers:
                reader.note(incarnation, stored, evicted)
            self.changed.fire()

    def heartbeat(self, beat: cp.HeartbeatRequest) -> None:
        """Pass a worker's heartbeat on with the next batch of each reader; the latest one counts."""
        for reader in self._readers:
            reader.note_heartbeat(beat)

    def end(self, incarnation: str) -> None:
        """A pool has ended, or nobody reports it any more."""
        if self._places.pop(incarnation, None) is not None:
            for reader in self._readers:
                reader.note_end(incarnation)
            self.changed.fire()

    @contextmanager
    def reported(self) -> Iterator[PoolReports]:
        """Return what takes in the reports of one stream; its pool ends with the context, unless another reports it."""
        reports = PoolReports(self)
        try:
            yield reports
        finally:
            if reports.incarnation and self._reports.get(reports.incarnation) is reports:
                del self._reports[reports.incarnation]
                self.end(reports.incarnation)

    def begin(self, reports: PoolReports) -> None:
        """From now on this stream reports its pool, and no earlier one does."""
        self._reports[reports.incarnation] = reports

    def is_latest(self, reports: PoolReports) -> bool:
        return self._reports.get(reports.incarnation) is reports

    @contextmanager
    def read(self) -> Iterator[PointReader]:
        """Return a reader that is told of all changes while the context lasts."""
        reader = PointReader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)


class PoolReports:
    """Takes in the reports of one worker about its pool."""

    def __init__(self, points: HostPoints) -> None:
        self.incarnation = ""
        self._points = points

    def take(self, report: kv.PoolReport) -> None:
        """Take in a report; raises InvalidRequest for one that cannot be of this stream, or with too many points."""
        stored, evicted = _keys(report.stored), _keys(report.evicted)
        if not self.incarnation:
            if not report.is_whole or not 0 < len(report.incarnation) <= _MAX_INCARNATION:
                raise InvalidRequest("the first report of a pool names its worker and is whole", field="incarnation")
            self.incarnation = report.incarnation
            self._points.begin(self)
        if report.incarnation != self.incarnation:
            raise InvalidRequest("the reports of one stream are of one worker", field="incarnation")
        if not self._points.is_latest(self):
            raise StaleIncarnation("another stream reports this pool now", field="incarnation")
        known = self._points.points_of(self.incarnation)
        if report.is_whole:
            whole = set(stored)
            evicted = [key for key in known if key not in whole]
        if len(known) + len(stored) - len(evicted) > _MAX_POINTS_OF_POOL:
            raise InvalidRequest(f"a pool has at most {_MAX_POINTS_OF_POOL:,} sample points here", field="stored")
        self._points.change(self.incarnation, stored, evicted)
        if report.HasField("heartbeat"):
            if report.heartbeat.incarnation != self.incarnation:
                raise InvalidRequest("a heartbeat in the report of a pool is its worker's", field="heartbeat")
            if report.heartbeat.ByteSize() <= _MAX_HEARTBEAT_BYTES:  # a larger one goes directly, and is refused there
                self._points.heartbeat(report.heartbeat)


def _keys(packed: bytes) -> list[bytes]:
    if len(packed) % NUM_KEY_BYTES:
        raise InvalidRequest(f"{len(packed)} bytes are no keys of {NUM_KEY_BYTES} bytes", field="stored")
    return [packed[start : start + NUM_KEY_BYTES] for start in range(0, len(packed), NUM_KEY_BYTES)]


class PointReader:
    """What one reader was not sent yet: everything, or the changes of each place."""

    def __init__(self, points: HostPoints) -> None:
        self._points = points
        self._needs_all = True
        self._pending: dict[str, dict[bytes, bool]] = {}
        self._ended: dict[str, None] = {}
        self._num_pending = 0
        self._number = 0
        self._heartbeats: dict[str, cp.HeartbeatRequest] = {}
        """By worker id, those that were not sent yet."""

    def note_heartbeat(self, beat: cp.HeartbeatRequest) -> None:
        if len(self._heartbeats) < _MAX_HEARTBEATS or beat.worker_id in self._heartbeats:
            self._heartbeats[beat.worker_id] = beat

    def note(self, incarnation: str, stored: Collection[bytes], evicted: Collection[bytes]) -> None:
        """Keep changes for the next batch; beyond 200,000 of them everything is sent instead."""
        if self._needs_all:
            return
        self._num_pending += len(stored) + len(evicted)
        if self._num_pending > _MAX_PENDING:
            self._forget_pending()
            self._needs_all = True
            return
        pending = self._pending.setdefault(incarnation, {})
        for keys, is_stored in ((evicted, False), (stored, True)):
            for key in keys:
                if pending.pop(key, is_stored) == is_stored:  # else the reader was sent the state before both
                    pending[key] = is_stored

    def note_end(self, incarnation: str) -> None:
        if not self._needs_all:
            self._pending.pop(incarnation, None)
            self._ended[incarnation] = None

    def take(self) -> Iterator[kv.BlockEventBatch]:
        """Yield what is pending, as messages: none if nothing is."""
        if self._needs_all:
            self._needs_all = False
            yield from self._everything()
        elif self._pending or self._ended:
            places = [kv.PlaceEvents(incarnation=incarnation, is_gone=True) for incarnation in self._ended]
            places += [
                kv.PlaceEvents(
                    incarnation=incarnation,
                    stored=b"".join(key for key, is_stored in changes.items() if is_stored),
                    evicted=b"".join(key for key, is_stored in changes.items() if not is_stored),
                )
                for incarnation, changes in self._pending.items()
            ]
            self._forget_pending()
            yield self._batch(places)
        if self._heartbeats:
            yield self._batch([])

    def _everything(self) -> Iterator[kv.BlockEventBatch]:
        """Copies all points at once: changes that come while a slow reader takes the parts are pending."""
        whole = [(incarnation, b"".join(points)) for incarnation, points in self._points.items()]
        yield self._batch([kv.PlaceEvents(incarnation=incarnation) for incarnation, _ in whole], is_snapshot=True)
        for incarnation, keys in whole:
            for start in range(0, len(keys), _BYTES_PER_BATCH):
                part = keys[start : start + _BYTES_PER_BATCH]
                yield self._batch([kv.PlaceEvents(incarnation=incarnation, stored=part)])

    def _batch(self, places: Collection[kv.PlaceEvents], *, is_snapshot: bool = False) -> kv.BlockEventBatch:
        beats, self._heartbeats = self._heartbeats, {}
        batch = kv.BlockEventBatch(
            number=self._number, is_snapshot=is_snapshot, places=places, heartbeats=beats.values()
        )
        self._number += 1
        return batch

    def _forget_pending(self) -> None:
        self._pending, self._ended, self._num_pending = {}, {}, 0

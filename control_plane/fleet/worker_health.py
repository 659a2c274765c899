"""Judges workers by what requests see of them, and takes sick ones out for some seconds.

A worker that says it is ready may still fail every request, refuse it, or never answer. Its heartbeats do not show
that; the calls of this gateway do. Each watched call gives one outcome: `ok`, `failed` or `slow`. The states, in the
order that a sick worker passes them:

1. ok. Three bad outcomes in a row, or half of the last 10 to 20 within 30 s, eject the worker. `slow` never ejects more
   than half of a model's workers of a role; `failed` may eject any number. Slow answers to calls that waited together,
   without a good one between them, are one: the worker may have stood still for a moment.
2. ejected, for 1 s; 2, 4 and at most 8 s if it fails again. It gets no requests.
3. probation. It gets a copy of one request at a time (`dispatch/trials.py`), whose answer nobody waits for. Three good
   outcomes in a row reinstate it; one bad outcome ejects it again.

Beside these a worker is `detached` while the gateway has no stream to it, and `overdue` (not shown) while a call waits
much longer than peers would need: others are preferred until it answers.

Ejection never leaves a model without service: if all attached workers are out, those with the fewest bad outcomes are
used.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from control_plane.fleet.answer_times import AnswerTimes, Usual, expected_seconds
from control_plane.fleet.attached import Attached, Everyone
from control_plane.fleet.call_watch import KEPT_SECONDS, CallWatch, Cause, Outcome, Past, Record, Status
from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem_runtime.log import get_logger

log = get_logger(__name__)

IN_A_ROW = 3
"""Bad outcomes that eject; good outcomes that reinstate."""
_NUM_FOR_SHARE = 10
_FIRST_EJECTION_SECONDS = 1.0
_LONGEST_EJECTION_SECONDS = 8.0
_WELL_SECONDS = 30.0
"""A worker that was well for so long is ejected for 1 s again."""

SLOW_TIMES = 5.0
SLOW_SECONDS = 0.05
"""A call is slow at 5 times what is usual among peers, and 50 ms more than that."""
_STALLED_TIMES = 4.0
_TRUSTED_SECONDS = 1.0
_NEW_SECONDS = 0.25
"""A call may wait at least so long at a worker that has answered, or that is new; else `SLOW_SECONDS`."""
_ANSWERS_OF_PEERS = 3
"""Answers to later calls that show that peers are well while a call waits."""
_ALONE_TIMES = 8.0
"""Without answers of peers a call has stalled at 8 times its prediction."""
LONGEST_SILENCE_SECONDS = 10.0
"""One call that waits for so long is enough to eject a worker."""


class WorkerHealth:
    """The records of all workers that calls were sent to; on the registry's event loop."""

    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._stood_still = 0.0
        """Seconds in which this process did not run: no worker could answer."""
        self._registry = registry
        self._records: dict[str, Record] = {}
        self._times: dict[tuple[str, int], AnswerTimes] = {}
        self._ratios: dict[tuple[str, int], float | None] = {}
        """The same as `usual_ratio`, since the last change of the times or of who is out."""
        self._out: set[str] = set()
        """Incarnations that are ejected or on probation."""
        self.attached: Attached = Everyone()
        """The workers whose streams are open."""
        self._listeners: list[Callable[[str], None]] = []
        self.num_ejections: Counter[tuple[int, Cause]] = Counter()
        """Since the start, by role and cause."""
        registry.listen(self._changed)

    def now(self) -> float:
        return self._clock() - self._stood_still

    def stood_still(self, seconds: float) -> None:
        """Leave a time out of all that calls have waited: this process was stopped or starved."""
        self._stood_still += seconds

    def ask_links(self, attached: Attached) -> None:
        """Take from the links which incarnations' streams are open; until then all count as attached."""
        self.attached = attached

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with an incarnation whose `oldest_begun` may be another."""
        self._listeners.append(listener)

    # --------------------------------------------------------------------------------------------- for the router

    @property
    def out(self) -> Collection[str]:
        """Incarnations that are ejected or on probation."""
        return self._out

    def usable(self, workers: list[Worker]) -> list[Worker]:
        """Return those of a model's workers of one role that new requests may go to."""
        attached = [worker for worker in workers if worker.incarnation in self.attached]
        if not attached:
            return attached
        well = [worker for worker in attached if worker.incarnation not in self._out]
        if not well:
            return self._least_bad(attached)
        return self._in_time(well) or well

    def well(self, workers: list[Worker]) -> list[Worker]:
        """Return those that nothing speaks against, of some of a model's workers of one role; there may be none."""
        attached, out = self.attached, self._out
        return self._in_time([each for each in workers if each.incarnation in attached and each.incarnation not in out])

    def usual_ratio(self, model_id: str, role: pb.WorkerRole.ValueType) -> float | None:
        """Return how many times the predicted seconds first tokens of these workers take; None: too few have come."""
        key = model_id, role
        if key not in self._ratios:
            self._ratios[key] = self._times_of(model_id, role).usual_ratio(self._out)
        return self._ratios[key]

    def oldest_begun(self, incarnation: str) -> tuple[float, float]:
        """Return when the call that waits the longest has begun, and its predicted seconds; (inf, 0): none has."""
        record = self._records.get(incarnation)
        oldest = None if record is None else record.oldest()
        if oldest is None or oldest.began_at is None or oldest.predicted_seconds is None:
            return math.inf, 0.0
        return oldest.began_at, oldest.predicted_seconds

    def _in_time(self, well: list[Worker]) -> list[Worker]:
        """Return the workers without an overdue call."""
        now, records, ratio, overdue = self.now(), self._records, None, set()
        for worker in well:
            record = records.get(worker.incarnation)
            if record is None or not record.waiting:
                continue
            oldest = next(iter(record.waiting))
            began_at, predicted_seconds = oldest.began_at, oldest.predicted_seconds
            if began_at is None or predicted_seconds is None or now - began_at < SLOW_SECONDS:
                continue
            if ratio is None and (ratio := self.usual_ratio(worker.figures.model_id, worker.role)) is None:
                return well
            if _is_slow(now - began_at, expected_seconds(ratio, predicted_seconds)):
                overdue.add(worker.incarnation)
        return [worker for worker in well if worker.incarnation not in overdue] if overdue else well

    def _least_bad(self, workers: list[Worker]) -> list[Worker]:
        now = self.now()
        shares = [round(self._records[worker.incarnation].share_bad(now), 1) for worker in workers]
        return [worker for worker, share in zip(workers, shares, strict=True) if share == min(shares)]

    # ------------------------------------------------------------------------------------------ what calls show

    def watch(self, worker: Worker, predicted_seconds: float | None) -> CallWatch:
        """Watch a call that is sent now. `predicted_seconds`: to its first token; None: it waits for another worker."""
        record = self._record(worker)
        watch = CallWatch(self, record, predicted_seconds, self.now())
        record.waiting[watch] = None
        if len(record.waiting) == 1:
            self.oldest_changed(record)
        return watch

    def oldest_changed(self, record: Record) -> None:
        for listener in self._listeners:
            listener(record.worker.incarnation)

    def answered(self, watch: CallWatch) -> None:
        """The first token of a call has come; see `CallWatch.output`."""
        now, record = self.now(), watch.record
        watch.closed()
        record.last_output_at = now
        watch.accepted()
        accepted_at, began_at = watch.accepted_at or now, watch.began_at
        accept_seconds = accepted_at - watch.sent_at
        if began_at is None or watch.predicted_seconds is None:
            self._count(record, watch.sent_at, "ok")
            return
        took, times = now - began_at, self._times_of_worker(record.worker)
        is_slow = self._is_slow_among_peers(record, times, accept_seconds, took, watch.predicted_seconds)
        if not self._is_out(record):
            times.add(record.worker.incarnation, watch.sent_at, accept_seconds, took, watch.predicted_seconds)
            self._ratios.clear()
        if is_slow and began_at < record.last_slow_at and record.last_good_at < record.last_slow_at:
            return  # the worker stood still, and has paid for that moment
        reason = f"its first tokens took {took:.2f} s, at least {SLOW_TIMES:g} times as long as its peers'"
        self._count(record, watch.sent_at, "slow" if is_slow else "ok", reason)

    def failed(self, watch: CallWatch, reason: str, cause: Cause, *, is_certain: bool) -> None:
        """A call has failed; see `CallWatch.failed`."""
        watch.closed()
        if watch.has_failed:
            return
        watch.has_failed = True
        if watch.record.worker.incarnation in self.attached:  # a broken stream counts once, not for each call
            self._count(watch.record, watch.sent_at, cause, reason, is_certain=is_certain)

    def stream_broke(self, worker: Worker, num_calls: int) -> None:
        """The stream to a worker has ended; `num_calls` waited for its events."""
        record = self._records.get(worker.incarnation)
        if record is not None and num_calls:
            self._count(record, self.now(), "failed", "its stream broke")

    def stalled(self) -> Iterator[tuple[CallWatch, str, bool]]:
        """Yield the calls that wait for a worker as if it were lost, while another worker could take them.

        With each call: why, and whether it alone is enough to eject the worker.
        """
        now = self.now()
        for record in [each for each in self._records.values() if each.waiting]:
            late = [watch for watch in record.waiting if now - watch.sent_at >= _floor_seconds(record)]
            if not late:  # nearly always
                continue
            times = self._times_of_worker(record.worker)
            usual = times.usual({record.worker.incarnation, *self._out})
            for watch in late:
                waited = self._stalled_seconds(watch, times, usual, now)
                if waited is not None and self._has_other(record):
                    what = "did not answer a Submit" if watch.accepted_at is None else "brought no token"
                    yield watch, f"it {what} for {waited:.2f} s", waited >= LONGEST_SILENCE_SECONDS

    def _stalled_seconds(self, watch: CallWatch, times: AnswerTimes, usual: Usual | None, now: float) -> float | None:
        """Return how long a call waits in vain; None: it may still be answered."""
        record, since = watch.record, watch.sent_at if watch.accepted_at is None else watch.began_at
        if since is None or record.last_output_at > since:
            return None
        floor, predicted = _floor_seconds(record), watch.predicted_seconds or 0.0
        is_known = record.is_doubtful or times.num_since(since, record.worker.incarnation) >= _ANSWERS_OF_PEERS
        if usual is None or not is_known:
            bound = max(LONGEST_SILENCE_SECONDS, _ALONE_TIMES * predicted)
        elif watch.accepted_at is None:
            bound = max(floor, _STALLED_TIMES * usual.late_accept_seconds)
        else:
            bound = max(floor, _STALLED_TIMES * usual.late_seconds(predicted))
        return now - since if now - since >= bound else None

    def _is_slow_among_peers(
        self, record: Record, times: AnswerTimes, accept_seconds: float, took: float, predicted_seconds: float
    ) -> bool:
        usual = times.usual({record.worker.incarnation, *self._out})
        if usual is None or usual.num_workers < 2:
            return False
        return _is_slow(accept_seconds, usual.accept_seconds) or _is_slow(
            took, usual.expected_seconds(predicted_seconds)
        )

    # ------------------------------------------------------------------------------------------------- the states

    def _count(
        self, record: Record, sent_at: float, outcome: Outcome, reason: str = "", *, is_certain: bool = False
    ) -> None:
        now = self.now()
        if self._records.get(record.worker.incarnation) is not record:
            return  # it is gone
        if self._is_out(record) and sent_at <= record.ejected_at:
            return  # it was sent before: the worker pays for it already
        record.outcomes.append(Past(now, outcome))
        if outcome == "ok":
            record.last_good_at = now
            record.num_bad_in_a_row, record.num_good_in_a_row = 0, record.num_good_in_a_row + 1
            if self._is_out(record) and record.num_good_in_a_row >= IN_A_ROW:
                self._reinstate(record)
            return
        record.last_bad_at = now
        if outcome == "slow":
            record.last_slow_at = now
        record.num_bad_in_a_row += IN_A_ROW if is_certain else 1
        record.num_good_in_a_row = 0
        if self._is_out(record):
            if now >= record.ejected_until:
                self._extend(record, reason)
        elif self._is_sick(record, now) and (outcome == "failed" or self._may_eject_slow(record)):
            self._eject(record, outcome, reason)

    def _is_sick(self, record: Record, now: float) -> bool:
        num_latest = sum(now - each.at <= KEPT_SECONDS for each in record.outcomes)
        return record.num_bad_in_a_row >= IN_A_ROW or (num_latest >= _NUM_FOR_SHARE and record.share_bad(now) >= 0.5)

    def _may_eject_slow(self, record: Record) -> bool:
        peers = self._peers(record)
        num_slow = sum(self._records[each].cause == "slow" for each in self._out if each in peers)
        return num_slow + 1 <= len(peers) // 2

    def _eject(self, record: Record, cause: Cause, reason: str) -> None:
        now, worker = self.now(), record.worker
        if record.reinstated_at < 0 or now - record.reinstated_at > _WELL_SECONDS:
            record.ejection_seconds = 0.0
        record.cause = cause
        self._out.add(worker.incarnation)
        self._ratios.clear()
        self.num_ejections[worker.role, cause] += 1
        self._extend(record, reason)
        log.warning(
            "worker_ejected",
            worker=worker.worker_id,
            role=pb.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower(),
            model=worker.info.card.model_id,
            cause=cause,
            reason=reason,
            seconds=record.ejection_seconds,
        )

    def _extend(self, record: Record, reason: str) -> None:
        record.ejection_seconds = min(
            _LONGEST_EJECTION_SECONDS, max(_FIRST_EJECTION_SECONDS, 2 * record.ejection_seconds)
        )
        record.reason = reason
        record.ejected_at = self.now()
        record.ejected_until = record.ejected_at + record.ejection_seconds

    def _reinstate(self, record: Record) -> None:
        worker, record.cause, record.reason = record.worker, None, ""
        self._out.discard(worker.incarnation)
        self._ratios.clear()
        record.outcomes.clear()
        record.reinstated_at = self.now()
        log.info(
            "worker_reinstated",
            worker=worker.worker_id,
            role=pb.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower(),
            model=worker.info.card.model_id,
        )

    # ------------------------------------------------------------------------------------------------- for trials

    def to_try(self, model_id: str) -> Record | None:
        """Return a worker of the model that is on probation and has no trial now."""
        for incarnation in self._out:
            record = self._records[incarnation]
            if record.worker.serves(model_id) and not record.has_trial and self.is_due(record):
                return record
        return None

    def is_due(self, record: Record) -> bool:
        """Return whether a worker is on probation, and can be reached."""
        incarnation = record.worker.incarnation
        return self._is_out(record) and self.now() >= record.ejected_until and incarnation in self.attached

    def trial_seconds(self, watch: CallWatch) -> float:
        """Return how long a trial may take: 1 s where peers are fast, so that it ends within 10 s of being well."""
        usual = self._times_of_worker(watch.record.worker).usual({watch.record.worker.incarnation, *self._out})
        predicted = watch.predicted_seconds or 0.0
        late = _ALONE_TIMES * predicted if usual is None else _STALLED_TIMES * usual.late_seconds(predicted)
        return max(_TRUSTED_SECONDS, late)

    # -------------------------------------------------------------------------------------------------- for views

    def status(self, worker: Worker) -> Status:
        """Return how requests find a worker. Metrics ask for it in a thread of their own."""
        if worker.role not in (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE):
            return Status("ok")
        if worker.incarnation not in self.attached:
            return Status("detached", "the gateway has no stream to it")
        record = self._records.get(worker.incarnation)
        if record is None or not self._is_out(record):
            return Status("ok")
        return Status("ejected" if self.now() < record.ejected_until else "probation", record.reason)

    # ---------------------------------------------------------------------------------------------------- records

    def _is_out(self, record: Record) -> bool:
        return record.worker.incarnation in self._out

    def _has_other(self, record: Record) -> bool:
        peers = self._peers(record)
        return any(
            each != record.worker.incarnation and each not in self._out and each in self.attached for each in peers
        )

    def _peers(self, record: Record) -> set[str]:
        """Return the incarnations that take requests of the record's model and role, its own included."""
        model_id, role = record.worker.info.card.model_id, record.worker.role
        peers = [worker for worker in self._registry.workers_of(model_id) if worker.is_usable]
        return {worker.incarnation for worker in peers if worker.role == role}

    def _record(self, worker: Worker) -> Record:
        record = self._records.get(worker.incarnation)
        if record is None:
            record = self._records[worker.incarnation] = Record(worker)
        record.worker = worker
        return record

    def _times_of_worker(self, worker: Worker) -> AnswerTimes:
        return self._times_of(worker.figures.model_id, worker.role)

    def _times_of(self, model_id: str, role: pb.WorkerRole.ValueType) -> AnswerTimes:
        key = model_id, role
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = AnswerTimes()
        return times

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if is_here:
            if (record := self._records.get(worker.incarnation)) is not None:
                record.worker = worker
            return
        self._records.pop(worker.incarnation, None)
        self._out.discard(worker.incarnation)
        self._ratios.clear()
        self._times_of_worker(worker).forget(worker.incarnation)
        model_id, role = worker.info.card.model_id, worker.role
        if not any(each.role == role for each in self._registry.workers_of(model_id)):
            self._times.pop((model_id, role), None)


def _is_slow(seconds: float, usual_seconds: float) -> bool:
    return seconds >= SLOW_TIMES * usual_seconds and seconds >= usual_seconds + SLOW_SECONDS


def _floor_seconds(record: Record) -> float:
    """Return how long each call to a worker may wait for its first token, whatever peers do."""
    if not record.is_doubtful:
        return _TRUSTED_SECONDS
    return _NEW_SECONDS if record.last_bad_at < 0 else SLOW_SECONDS

"""How fast does each worker read prompts, how long does a hand-over take, and what of a host's store comes true?

Measured from what requests did; the assumptions hold until the first of them has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

_ASSUMED_TOKENS_PER_SECOND = 1000.0
ASSUMED_STEP_MS = 50.0
_ASSUMED_HAND_OVER_MS = 8.0
MEMORY_BYTES_PER_SECOND = 5e9
"""From the host's store into a pool: one copy, beside other work."""
_ASSUMED_LINK_BYTES_PER_SECOND = 1e9
_ASSUMED_FETCH_MS = 2.0
"""What asking another host's store takes before the first byte."""
_OLD_WEIGHT = 0.8
"""What a measurement keeps of those before it."""
_TYPICAL_SECONDS = 0.5
"""How long a mean over all workers is used: they report each second, and every request asks for it."""
_MAX_HAND_OVER_MS = 10_000.0
"""More is two hosts' clocks, not a hand-over."""


class Speeds:
    """What one gateway has measured; forgets workers with their incarnation."""

    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._typical_rates: dict[tuple[str, pb.WorkerRole.ValueType], tuple[float, float]] = {}
        self._read: dict[str, tuple[float, float]] = {}
        self._kept_promises: dict[str, float] = {}
        self.hand_over_ms = _ASSUMED_HAND_OVER_MS
        """From prefill's first token until decode has every block."""
        registry.listen(self._changed)

    # ------------------------------------------------------------------------------------------------- asking

    def tokens_per_second(self, worker: Worker) -> float:
        """Return at what rate a worker reads prompts; of one that has read none, as its peers do."""
        own = self._measured(worker)
        return self._typical(worker.info.card.model_id, worker.role) if own is None else own

    def fetch_ms(self, source: Worker, store: Worker, num_bytes: int) -> float:
        """Return what it takes one host's store to fetch bytes of another's, by what it has measured of their link."""
        for link in store.load.kv_service.links:
            if link.address == source.info.address and link.bytes_per_second > 0:
                return link.latency_ms + 1000.0 * num_bytes / link.bytes_per_second
        return _ASSUMED_FETCH_MS + 1000.0 * num_bytes / _ASSUMED_LINK_BYTES_PER_SECOND

    def kept_promise(self, host_id: str) -> float:
        """Return which share of the tokens expected in a host's store came from there lately, 0 to 1."""
        return self._kept_promises.get(host_id, 1.0)

    # ----------------------------------------------------------------------------------------------- measuring

    def prompt_read(self, incarnation: str, ledger: pb.PhaseLedger) -> None:
        """Take in the ledger of a phase that has computed a prompt, or the rest of one."""
        seconds = (ledger.first_token_ns - ledger.scheduled_ns) / 1e9
        if seconds > 0 and ledger.num_computed_tokens and ledger.scheduled_ns:
            num_tokens, num_seconds = self._read.get(incarnation, (0.0, 0.0))
            self._read[incarnation] = (
                _OLD_WEIGHT * num_tokens + ledger.num_computed_tokens,
                _OLD_WEIGHT * num_seconds + seconds,
            )

    def handed_over(self, prefill: pb.PhaseLedger, decode: pb.PhaseLedger) -> None:
        """Take in the ledgers of both halves of a request."""
        if prefill.first_token_ns and decode.transfer_end_ns:
            took_ms = min(_MAX_HAND_OVER_MS, max(0.0, (decode.transfer_end_ns - prefill.first_token_ns) / 1e6))
            self.hand_over_ms = _mixed(self.hand_over_ms, took_ms)

    def promised(self, host_id: str, num_tokens: int, num_found: int) -> None:
        """Note how many of the tokens expected in a host's store were there."""
        if num_tokens > 0:
            share = min(1.0, max(0.0, num_found / num_tokens))
            self._kept_promises[host_id] = _mixed(self.kept_promise(host_id), share)

    def _typical(self, model_id: str, role: pb.WorkerRole.ValueType) -> float:
        """Return the mean rate of a model's workers of that role, else of its prefill workers, as of lately."""
        rate, until = self._typical_rates.get((model_id, role), (0.0, 0.0))
        if self._clock() >= until:
            rate = (
                self._mean(model_id, role) or self._mean(model_id, pb.WORKER_ROLE_PREFILL) or _ASSUMED_TOKENS_PER_SECOND
            )
            self._typical_rates[model_id, role] = rate, self._clock() + _TYPICAL_SECONDS
        return rate

    def _mean(self, model_id: str, role: pb.WorkerRole.ValueType) -> float | None:
        peers = [peer for peer in self._registry.workers(role) if peer.info.card.model_id == model_id]
        rates = [rate for peer in peers if (rate := self._measured(peer)) is not None]
        return fmean(rates) if rates else None

    def _measured(self, worker: Worker) -> float | None:
        """Prefill reports its rate itself: its steps read prompts and do nothing else."""
        if worker.role == pb.WORKER_ROLE_PREFILL:
            counters = worker.load.counters
            num_tokens, seconds = counters.get("prompt_tokens_computed", 0.0), counters.get("step_seconds", 0.0)
        else:
            num_tokens, seconds = self._read.get(worker.incarnation, (0.0, 0.0))
        return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if not is_here:
            self._read.pop(worker.incarnation, None)
            if not any(other.info.host_id == worker.info.host_id for other in self._registry.workers()):
                self._kept_promises.pop(worker.info.host_id, None)


def step_ms(worker: Worker) -> float | None:
    """Return what a step took on average over the worker's life; None before its first."""
    num_steps = worker.load.counters.get("steps", 0.0)
    return 1000.0 * worker.load.counters.get("step_seconds", 0.0) / num_steps if num_steps > 0 else None


def _mixed(old: float, new: float) -> float:
    return _OLD_WEIGHT * old + (1 - _OLD_WEIGHT) * new

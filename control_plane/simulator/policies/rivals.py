"""The rules of other routers, from their documents and sources; our own code.

    round_robin      each role in turn
    least_requests   the worker with the fewest requests that this gateway has sent and that have not ended
    power_of_two     the better of two random workers (Mitzenmacher, IEEE TPDS 2001)
    prefix_hash      the prompt's first blocks name the worker by consistent hashing with bounded load 1.25, as in the
                     "prefix hash" strategy of KubeAI and in Mirrokni et al., SODA 2018
    llm_d            the default scorers of llm-d's endpoint picker: queue 2, KV cache utilisation 2, prefix cache 3
                     (pkg/epp/config/loader/defaults.go, commit 520af478), the highest sum, ties at random, metrics
                     read every 50 ms, an index of its own decisions; for prefill and for decode, always handed over
    dynamo_cost      the documented cost of Dynamo's router ("Routing concepts", version 1.5): prefill by active and
                     new prompt blocks less the overlap times its weight, decode by active blocks; the least, ties at
                     random; it sees its workers' KV events at once

All count a prefill until its first token and an answer until its end, at once and without error.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from control_plane.simulator.engine import Job, Report
from control_plane.simulator.policies.policy import Placement
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.traces import TraceRequest

_PREFIX_BLOCKS = 1
_LOAD_BOUND = 1.25
_RING_POINTS = 64


class Rival:
    """What the rivals have in common: counts of their own, and prefill and decode chosen apart."""

    report_seconds: float | None = None

    def __init__(self, fleet: FleetProfile, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._prefills = range(fleet.num_prefill)
        self._decodes = range(fleet.num_prefill, fleet.num_workers)
        self._num_requests = [0] * fleet.num_workers
        self._num_tokens = [0] * fleet.num_workers
        """Prompt tokens at prefill workers, prompt and answer tokens at decode workers."""
        self._reports: dict[int, Report] = {}
        self._prefill_of: dict[int, tuple[int, int]] = {}
        """By request: its prefill worker, and the tokens counted there."""

    def place(self, request: TraceRequest, now: float) -> Placement | None:
        prefill = self._choose(self._prefills, request) if self._prefills else None
        first = self._choose(self._decodes, request)
        others = sorted(
            (number for number in self._decodes if number != first), key=lambda number: self._num_tokens[number]
        )
        return Placement(
            prefill, (first, *others), predicted_cached=self._predicted(request, first if prefill is None else prefill)
        )

    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        raise NotImplementedError

    def _predicted(self, request: TraceRequest, worker: int) -> int:
        return 0

    def _cost_tokens(self, request: TraceRequest, worker: int) -> int:
        """Return the tokens by which a prompt counts at the worker that computes it."""
        return request.num_prompt_tokens

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        if placement.prefill is not None:
            num_tokens = self._cost_tokens(request, placement.prefill)
            self._prefill_of[request.number] = placement.prefill, num_tokens
            self._num_requests[placement.prefill] += 1
            self._num_tokens[placement.prefill] += num_tokens
        self._num_requests[decode] += 1
        self._num_tokens[decode] += request.num_prompt_tokens

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        if not was_pulled and (counted := self._prefill_of.pop(request.number, None)) is not None:
            self._num_requests[counted[0]] -= 1
            self._num_tokens[counted[0]] -= counted[1]

    def ended(self, request: TraceRequest, decode: int, hand_over_seconds: float | None) -> None:
        self._num_requests[decode] -= 1
        self._num_tokens[decode] -= request.num_prompt_tokens

    def report(self, report: Report, now: float) -> None:
        self._reports[report.number] = report

    def _least(self, workers: Sequence[int], cost: Callable[[int], float]) -> int:
        """Return a worker of the least cost, one at random of several."""
        costs = [cost(number) for number in workers]
        least = min(costs)
        return self._rng.choice([number for number, each in zip(workers, costs, strict=True) if each == least])


class RoundRobin(Rival):
    def __init__(self, fleet: FleetProfile, seed: int) -> None:
        super().__init__(fleet, seed)
        self._next = {self._prefills: 0, self._decodes: 0}

    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        assert isinstance(workers, range)
        place = self._next[workers]
        self._next[workers] = (place + 1) % len(workers)
        return workers[place]


class LeastRequests(Rival):
    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        return self._least(workers, lambda number: self._num_requests[number])


class PowerOfTwo(Rival):
    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        two = self._rng.sample(workers, min(2, len(workers)))
        return min(two, key=lambda number: self._num_requests[number])


class PrefixHash(Rival):
    def __init__(self, fleet: FleetProfile, seed: int) -> None:
        super().__init__(fleet, seed)
        self._rings = {workers: _ring(workers) for workers in (self._prefills, self._decodes)}

    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        assert isinstance(workers, range)
        ids = request.full_blocks[:_PREFIX_BLOCKS] or (-1 - request.number,)
        point = _hash(f"prompt {ids}")
        ring = self._rings[workers]
        bound = _LOAD_BOUND * (sum(self._num_requests[number] for number in workers) + 1) / len(workers)
        start = next((place for place, (each, _) in enumerate(ring) if each >= point), 0)
        for place in range(len(ring)):
            number = ring[(start + place) % len(ring)][1]
            if self._num_requests[number] + 1 <= max(1.0, bound):
                return number
        return self._least(workers, lambda number: self._num_requests[number])


class LlmD(Rival):
    report_seconds: float | None = 0.05

    def __init__(
        self, fleet: FleetProfile, seed: int, queue: float = 2.0, usage: float = 2.0, prefix: float = 3.0
    ) -> None:
        super().__init__(fleet, seed)
        self._weights = queue, usage, prefix
        self._index = _PrefixLru(fleet)

    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        queue_weight, usage_weight, prefix_weight = self._weights
        reports = [self._reports[number] for number in workers]
        queues = [report.num_waiting for report in reports]
        most, fewest = max(queues), min(queues)
        num_blocks = max(1, len(request.full_blocks))
        scores = {}
        for number, report, queue in zip(workers, reports, queues, strict=True):
            queue_score = 1.0 if most == fewest else (most - queue) / (most - fewest)
            usage_score = 1.0 - report.num_used_tokens / report.num_total_tokens
            prefix_score = self._index.num_found(number, request) / num_blocks
            scores[number] = queue_weight * queue_score + usage_weight * usage_score + prefix_weight * prefix_score
        return self._least(workers, lambda number: -scores[number])

    def _predicted(self, request: TraceRequest, worker: int) -> int:
        return self._index.num_found(worker, request) * request.block_tokens

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        super().accepted(request, placement, decode)
        if placement.prefill is not None:
            self._index.learn(placement.prefill, request)
        self._index.learn(decode, request)


class DynamoCost(Rival):
    def __init__(self, fleet: FleetProfile, seed: int, overlap_weight: float = 1.0) -> None:
        super().__init__(fleet, seed)
        self._overlap_weight = overlap_weight
        self._index = _PrefixLru(fleet)

    def _choose(self, workers: Sequence[int], request: TraceRequest) -> int:
        if workers is self._decodes and self._prefills:
            return self._least(workers, lambda number: self._num_tokens[number])

        def cost(number: int) -> float:
            overlap = self._index.num_found(number, request) * request.block_tokens
            return self._num_tokens[number] + request.num_prompt_tokens - self._overlap_weight * overlap

        return self._least(workers, cost)

    def _cost_tokens(self, request: TraceRequest, worker: int) -> int:
        return request.num_prompt_tokens - self._predicted(request, worker)

    def _predicted(self, request: TraceRequest, worker: int) -> int:
        return self._index.num_found(worker, request) * request.block_tokens

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        super().prompt_read(request, worker, job, was_pulled=was_pulled)
        self._index.learn(worker, request)


class _PrefixLru:
    """Which blocks each worker has had lately; as many as its pool holds."""

    def __init__(self, fleet: FleetProfile) -> None:
        self._fleet = fleet
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(fleet.num_workers)]

    def num_found(self, number: int, request: TraceRequest) -> int:
        known = self._blocks[number]
        for place, block_id in enumerate(request.full_blocks):
            if block_id not in known:
                return place
        return len(request.full_blocks)

    def learn(self, number: int, request: TraceRequest) -> None:
        known = self._blocks[number]
        profile = self._fleet.prefill if number < self._fleet.num_prefill else self._fleet.decode
        for block_id in reversed(request.full_blocks):
            known[block_id] = None
            known.move_to_end(block_id)
        while len(known) > profile.kv_tokens // request.block_tokens:
            known.popitem(last=False)


def _ring(workers: Sequence[int]) -> list[tuple[int, int]]:
    return sorted((_hash(f"worker {number} {point}"), number) for number in workers for point in range(_RING_POINTS))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

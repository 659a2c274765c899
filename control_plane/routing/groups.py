"""Groups a model's workers by the KV blocks that they can pass to each other, and weighs the groups.

Workers of one space have equal blocks: of one numerics class and layout, or of one family of layouts where the model's
exactness is "layout". A prompt that a prefill worker computes goes to a decode worker of the same group. During an
upgrade, and on mixed hardware, a model has several groups.

The group of a new request is drawn at random, in proportion to free capacity. A group's capacity is the smaller of its
share of the model's prefill speed and its share of the model's KV pools; without prefill workers, the latter. It counts
times the speed that one more answer would get there: engines of different speeds have about as many answers each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean

from control_plane.fleet.registry import Worker
from control_plane.routing.cost_model import CostModel, InFlight, RoutingRequest

TIE = 1.05
"""Costs that differ by less than 5 % are equal: predictions are no better, and several gateways predict the same."""


@dataclass(frozen=True, eq=False)
class Group:
    """The workers of one space that a request may go to."""

    space: bytes
    fitting: list[Worker] = field(default_factory=list)
    """Decode workers whose pools could hold the request, those that have refused it included."""
    decodes: list[Worker] = field(default_factory=list)
    """Of these, the ones that may be asked."""
    prefills: list[Worker] = field(default_factory=list)


def groups_of(fitting: Iterable[Worker], prefills: Iterable[Worker], avoid: Collection[str]) -> list[Group]:
    """Return the groups that have a decode worker to ask, in the order of their first workers."""
    groups: dict[bytes, Group] = {}
    for worker in fitting:
        group = groups.setdefault(worker.space, Group(worker.space))
        group.fitting.append(worker)
        if worker.incarnation not in avoid:
            group.decodes.append(worker)
    for worker in prefills:
        if worker.space in groups:
            groups[worker.space].prefills.append(worker)
    return [group for group in groups.values() if group.decodes]


def preferred(groups: list[Group], request: RoutingRequest) -> list[Group]:
    """Return the groups whose workers go on with a choice as it was begun; all groups if there are none.

    Of a group with several numerics classes, the workers of the others are left out.
    """
    if request.preferred_space:
        groups = [group for group in groups if group.space == request.preferred_space] or groups
    if request.preferred_class:
        of_class = [_of_class(group, request.preferred_class) for group in groups]
        groups = [group for group in of_class if group.decodes] or groups
    return groups


def index_space(worker: Worker) -> bytes:
    """Return the space that the prefix index has a worker's blocks under.

    A worker of release 0.2 keeps its blocks under other keys than its successors of the same class.
    """
    card = worker.info.card
    return worker.space if card.takes_spaces else _old_space(card.fingerprint.digest, card.block_size)


def free_capacities(groups: Sequence[Group], costs: CostModel, in_flight: InFlight) -> list[float]:
    """Return a weight for each group; all are 1 if nothing is free anywhere."""
    speeds = [sum(_free_speed(worker, costs) for worker in group.prefills) for group in groups]
    tokens = [sum(_free_tokens(worker, in_flight) for worker in group.decodes) for group in groups]
    weights = [
        (min(speed, share) if group.prefills else share) * _answer_speed(group, costs, in_flight)
        for group, speed, share in zip(groups, _shares(speeds), _shares(tokens), strict=True)
    ]
    return weights if sum(weights) > 0 else [1.0] * len(groups)


def _free_speed(worker: Worker, costs: CostModel) -> float:
    """Return prompt tokens per second; a queue of a second halves them."""
    rate = costs.tokens_per_second(worker)
    return rate / (1 + costs.num_queued(worker) / rate)


def _answer_speed(group: Group, costs: CostModel, in_flight: InFlight) -> float:
    """Return the tokens per second that one more answer would get at a worker, if all answers there get as many."""

    def of_worker(worker: Worker) -> float:
        num_answers = max(in_flight.answers[worker.incarnation], worker.load.num_running + worker.load.num_waiting)
        return costs.answer_tokens_per_second(worker) / (1 + num_answers)

    return fmean(of_worker(worker) for worker in group.decodes)


def _free_tokens(worker: Worker, in_flight: InFlight) -> float:
    """Return the tokens of a KV pool that no request has taken; 1 if the pool is not reported yet."""
    pool = worker.load.kv
    total = pool.num_total_blocks * pool.tokens_per_block
    if not total:
        return 1.0
    return max(0.0, total - max(in_flight.decode_tokens[worker.incarnation], worker.load.num_tokens_in_flight))


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 0.0 for value in values]


def _of_class(group: Group, numerics_class: str) -> Group:
    decodes = [worker for worker in group.decodes if worker.info.card.fingerprint.numerics_class == numerics_class]
    return replace(group, decodes=decodes)


@lru_cache(maxsize=1024)
def _old_space(fingerprint: bytes, block_size: int) -> bytes:
    return hashlib.blake2b(fingerprint, digest_size=16, salt=block_size.to_bytes(8, "little")).digest()

"""Groups a model's workers by the KV blocks that they can pass to each other, and weighs the groups.

Workers of one space have equal blocks: of one numerics class and layout, or of one family of layouts where the model's
exactness is "layout". A prompt that a prefill worker computes goes to a decode worker of the same space. The decode
workers of a group are of one numerics class, so about equally fast; its prefill workers are those of the space. During
an upgrade, and on mixed hardware, a model has several groups.

The group of a new request is drawn at random, in proportion to free capacity. A group's capacity is the smaller of its
share of the model's prefill speed and its share of the model's KV pools; without prefill workers, the latter. It counts
times the speed that one more answer would get there: engines of different speeds have about as many answers each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from control_plane.fleet.registry import Worker
from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.worker_table import WorkerTable

TIE = 1.05
"""Costs that differ by less than 5 % are equal: predictions are no better, and several gateways predict the same."""
SAME_QUEUE = 0.02
"""Of a prompt: prefill queues that differ by less are equal, and so are those that differ by less than 5 %.

Workers with other queues are not equal, whatever the prompt takes: a speed is a prediction, a queue is there.
"""


class Group(NamedTuple):
    """The tables of the workers of one space that a request may go to; the decode workers are of one class."""

    space: bytes
    decodes: list[WorkerTable]
    prefills: list[WorkerTable]

    @property
    def num_decodes(self) -> int:
        return sum([len(table.incarnations) for table in self.decodes])

    @property
    def num_prefills(self) -> int:
        return sum([len(table.incarnations) for table in self.prefills])


def preferences(groups: Sequence[Group], request: RoutingRequest) -> Iterator[tuple[Sequence[Group], str]]:
    """Yield groups to look for workers in, and the numerics class to look for ("": any), the best ones first.

    A choice goes on where its blocks can be read, and in the numerics class that it was begun in, if that is possible.
    """
    if not (request.preferred_space or request.preferred_class):  # nearly always
        if groups:
            yield groups, ""
        return
    of_space = [group for group in groups if group.space == request.preferred_space] if request.preferred_space else []
    for wanted in (of_space, groups):
        for numerics_class in dict.fromkeys((request.preferred_class, "")):
            if wanted:
                yield wanted, numerics_class


def index_space(worker: Worker) -> bytes:
    """Return the space that the prefix index has a worker's blocks under.

    A worker of release 0.2 keeps its blocks under other keys than its successors of the same class.
    """
    card = worker.info.card
    return worker.space if card.takes_spaces else _old_space(card.fingerprint.digest, card.block_size)


@lru_cache(maxsize=1024)
def _old_space(fingerprint: bytes, block_size: int) -> bytes:
    return hashlib.blake2b(fingerprint, digest_size=16, salt=block_size.to_bytes(8, "little")).digest()

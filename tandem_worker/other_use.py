"""Tells each gateway what the requests of the others have used, so that all of them count an account alike."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tandem.v1 import types_pb2 as pb

_Stream = TypeVar("_Stream", bound=Hashable)

_TELL_SECONDS = 1.0
_MAX_ACCOUNTS = 1000
"""That wait to be told of; beyond it those that were used first are dropped."""


@dataclass(eq=False)
class _Told:
    at: float
    used: OrderedDict[str, pb.AccountUse] = field(default_factory=OrderedDict)

    def add(self, fairness_key: str, num_computed: int, num_sampled: int) -> None:
        use = self.used.get(fairness_key)
        if use is None:
            use = self.used[fairness_key] = pb.AccountUse(fairness_key=fairness_key)
            if len(self.used) > _MAX_ACCOUNTS:
                self.used.popitem(last=False)
        use.num_computed_tokens += num_computed
        use.num_sampled_tokens += num_sampled


class OtherUse(Generic[_Stream]):
    """Of one worker; on one event loop. It needs no timer: while nothing is used there is nothing to tell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[_Stream, _Told] = {}

    def tell(self, stream: _Stream) -> None:
        """Tell a gateway from now on."""
        self._told[stream] = _Told(self._clock())

    def forget(self, stream: _Stream) -> None:
        """A gateway's stream has ended."""
        self._told.pop(stream, None)

    def used(self, stream: _Stream, fairness_key: str, num_computed: int, num_sampled: int) -> None:
        """A request of a gateway has had so many prompt tokens computed, and so many tokens sampled."""
        if not fairness_key or not (num_computed or num_sampled):
            return
        for other, told in self._told.items():
            if other is not stream:
                told.add(fairness_key, num_computed, num_sampled)

    def due(self) -> Iterator[tuple[_Stream, pb.Event]]:
        """Yield what gateways should be told now: at most once a second."""
        now = self._clock()
        for stream, told in self._told.items():
            if told.used and now - told.at >= _TELL_SECONDS:
                yield stream, pb.Event(used_elsewhere=pb.UsedElsewhere(accounts=told.used.values()))
                told.at, told.used = now, OrderedDict()

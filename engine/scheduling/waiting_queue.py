"""Who waits, and who of them is next?

Higher priority first. Within one priority: requests that were preempted, earliest arrival first, since they ran
before; then one request of each fairness key in turn, so that a client with a thousand requests does not stand before
one with a single request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from engine.scheduling.request import Request, RequestState


class WaitingQueue:
    """`peek` and `pop` agree as long as nothing is added or removed between them."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels.values())

    def __iter__(self) -> Iterator[Request]:
        return (request for _, level in sorted(self._levels.items(), reverse=True) for request in level)

    @property
    def num_preempted(self) -> int:
        return sum(len(level.preempted) for level in self._levels.values())

    def add(self, request: Request) -> None:
        self._levels.setdefault(request.priority, _Level()).add(request)

    def peek(self) -> Request | None:
        return self._levels[max(self._levels)].peek() if self._levels else None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self._levels[request.priority].take(request, serve=True)
        self._drop_if_empty(request.priority)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that will not run; its key keeps its turn."""
        self._levels[request.priority].take(request, serve=False)
        self._drop_if_empty(request.priority)

    def _drop_if_empty(self, priority: int) -> None:
        if not len(self._levels[priority]):
            del self._levels[priority]


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.preempted: list[Request] = []
        self._turns: OrderedDict[str, deque[Request]] = OrderedDict()  # the next key first

    def __len__(self) -> int:
        return len(self.preempted) + sum(len(requests) for requests in self._turns.values())

    def __iter__(self) -> Iterator[Request]:
        yield from self.preempted
        for requests in self._turns.values():
            yield from requests

    def add(self, request: Request) -> None:
        if request.state is RequestState.PREEMPTED:
            self.preempted.append(request)
            self.preempted.sort(key=lambda preempted: preempted.arrival)
        else:
            self._turns.setdefault(request.fairness_key, deque()).append(request)

    def peek(self) -> Request:
        return self.preempted[0] if self.preempted else next(iter(self._turns.values()))[0]

    def take(self, request: Request, *, serve: bool) -> None:
        """Take a request out; `serve`: it runs, so its key goes behind the others."""
        if request.state is RequestState.PREEMPTED:
            self.preempted.remove(request)
            return
        key = request.fairness_key
        self._turns[key].remove(request)
        if not self._turns[key]:
            del self._turns[key]
        elif serve:
            self._turns.move_to_end(key)

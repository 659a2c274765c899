"""Orders the waiting requests.

Priority classes are strict: the higher class is first. Ageing is the exception: a class that has waited
`AGEING_SECONDS` for a turn gets the next one. The request that takes this turn gets the effective priority of the
highest class, so it is not preempted at once. So the n-th request of any class leaves the queue after at most
n * AGEING_SECONDS and n admissions per waiting class, plus the time until blocks and seats are free.

Within a class, preempted requests are first, by arrival. Then comes the key that was served the fewest tokens
(`shares`), with its requests in order of arrival. So of two waiting keys, neither is ahead of the other by more than
the cost of one request and of its running requests.

The next request stays next until it runs or leaves, even if it does not fit yet and fairness would choose another one
by now. Otherwise small requests would overtake a large request whenever blocks are freed, and it would never run. Only
a request of a higher class, and a preempted request of its own class, go before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from tandem_engine.scheduling.request import Request, RequestState
from tandem_engine.scheduling.shares import Shares

AGEING_SECONDS = 5.0
_MAX_EMPTY_LEVELS = 16


class WaitingQueue:
    """`peek` and `pop` return the same request if nothing is added or removed between them. Times are nanoseconds."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}  # empty levels remember the counters of keys
        self._turn: _Level | None = None
        self._turn_is_due_to_age = False
        self._num_by_key: Counter[str] = Counter()
        self.num_preempted = 0

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels.values())

    def __iter__(self) -> Iterator[Request]:
        return (request for _, level in sorted(self._levels.items(), reverse=True) for request in level)

    def num_of_key(self, fairness_key: str) -> int:
        """Count a key's requests that have not run yet."""
        return self._num_by_key[fairness_key]

    def add(self, request: Request, now_ns: int) -> None:
        if request.state is RequestState.PREEMPTED:
            self.num_preempted += 1
            self._level(request.effective_priority).add(request, now_ns)
        else:
            self._num_by_key[request.fairness_key] += 1
            self._level(request.priority).add(request, now_ns)

    def peek(self, now_ns: int) -> Request | None:
        self._choose_turn(now_ns)
        return self._turn.peek() if self._turn is not None else None

    def pop(self, now_ns: int) -> Request:
        request = self.peek(now_ns)
        assert request is not None and self._turn is not None, "pop from an empty queue"
        self._turn.choose(request, now_ns)
        self._take(request)
        if self._turn_is_due_to_age:
            request.effective_priority = max(self._levels)
        self._turn = None
        return request

    def remove(self, request: Request) -> None:
        """Remove a request that will not run; its key is not charged."""
        self._take(request)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens that were computed or sampled for a request, which may never have waited here."""
        self._level(request.priority).shares.charge(request.fairness_key, num_tokens)

    def served(self, request: Request) -> float:
        """Return the tokens charged to the request's key in its class."""
        return self._level(request.priority).shares.served(request.fairness_key)

    def arrived(self, request: Request, keys: Iterable[str]) -> None:
        """Add the key of a request that does not wait; `keys` are the other keys that are present."""
        self._level(request.priority).shares.arrive(request.fairness_key, keys)

    def _take(self, request: Request) -> None:
        if request.state is RequestState.PREEMPTED:
            self.num_preempted -= 1
            self._levels[request.effective_priority].take(request)
            return
        self._levels[request.priority].take(request)
        self._num_by_key[request.fairness_key] -= 1
        if not self._num_by_key[request.fairness_key]:
            del self._num_by_key[request.fairness_key]

    def _choose_turn(self, now_ns: int) -> None:
        waiting = {priority: level for priority, level in self._levels.items() if len(level)}
        if not waiting:
            self._turn = None
            return
        highest, turn = waiting[max(waiting)], self._turn
        if turn is not None and len(turn) and (turn is highest or self._turn_is_due_to_age):
            return
        oldest = min(waiting.values(), key=lambda level: level.since_ns)
        is_old = now_ns - oldest.since_ns >= AGEING_SECONDS * 1e9
        self._turn_is_due_to_age = is_old and oldest is not highest
        self._turn = oldest if self._turn_is_due_to_age else highest

    def _level(self, priority: int) -> _Level:
        if priority not in self._levels:
            empty = [number for number, level in self._levels.items() if not len(level)]
            for number in empty[: max(0, len(empty) - _MAX_EMPTY_LEVELS + 1)]:
                del self._levels[number]
            self._levels[priority] = _Level()
        return self._levels[priority]


class _Level:
    """The requests of one class."""

    def __init__(self) -> None:
        self.since_ns = 0
        """Time of its last turn, or of its first waiting request."""
        self.shares = Shares()
        self._preempted: list[Request] = []
        self._by_key: dict[str, deque[Request]] = {}
        self._head: Request | None = None

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for requests in self._by_key.values():
            yield from requests

    def add(self, request: Request, now_ns: int) -> None:
        if not len(self):
            self.since_ns = now_ns
        if request.state is RequestState.PREEMPTED:
            self._preempted.append(request)
            self._preempted.sort(key=lambda preempted: preempted.arrival)
            return
        key = request.fairness_key
        if key not in self._by_key:
            self.shares.arrive(key, self._by_key)
            self._by_key[key] = deque()
        self._by_key[key].append(request)

    def peek(self) -> Request:
        if self._preempted:
            return self._preempted[0]
        if self._head is None:
            heads = (requests[0] for requests in self._by_key.values())
            self._head = min(heads, key=lambda head: (self.shares.served(head.fairness_key), head.arrival))
        return self._head

    def choose(self, request: Request, now_ns: int) -> None:
        """Give this request the turn."""
        self.since_ns = now_ns
        if request.state is not RequestState.PREEMPTED:
            self.shares.choose(request.fairness_key)

    def take(self, request: Request) -> None:
        if request.state is RequestState.PREEMPTED:
            self._preempted.remove(request)
            return
        if request is self._head:
            self._head = None
        key = request.fairness_key
        self._by_key[key].remove(request)
        if not self._by_key[key]:
            del self._by_key[key]

"""Orders requests that wait for the same thing: for blocks and a seat, or for a seat alone.

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
from collections.abc import Iterator
from typing import NamedTuple

from tandem_engine.scheduling.request import Request, RequestState
from tandem_engine.scheduling.shares import ClassShares, Shares

AGEING_SECONDS = 5.0
AGEING_NS = int(AGEING_SECONDS * 1e9)


class Standing(NamedTuple):
    """Compares the next requests of two queues; the smaller one is first."""

    is_early: bool
    """Its class has waited less than `AGEING_SECONDS`."""
    order: int
    """Since when its class waits if that is long; else its priority, negative."""
    served: float
    arrival: int

    def is_before(self, since_ns: int) -> bool:
        """Whether its class is due for a turn, and longer than since `since_ns`."""
        return not self.is_early and self.order < since_ns


class WaitingQueue:
    """`peek` and `pop` return the same request if nothing is added or removed between them. Times are nanoseconds."""

    def __init__(self, shares: ClassShares, *, waits_for_blocks: bool = True) -> None:
        """Without a wait for blocks, any request fits: the next one need not stay next."""
        self._shares = shares
        self._waits_for_blocks = waits_for_blocks
        self._levels: dict[int, _Level] = {}  # the classes that wait, by effective priority
        self._turn: _Level | None = None
        self._turn_is_due_to_age = False
        self._num_by_key: Counter[str] = Counter()
        self.num_preempted = 0

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels.values())

    def __bool__(self) -> bool:
        return bool(self._levels)  # each has a request: asked several times a step

    def __iter__(self) -> Iterator[Request]:
        return (request for _, level in sorted(self._levels.items(), reverse=True) for request in level)

    def num_of_key(self, fairness_key: str) -> int:
        """Count a key's requests that were not preempted."""
        return self._num_by_key[fairness_key]

    def add(self, request: Request, now_ns: int, *, is_first: bool = False) -> None:
        """Add a request; with `is_first`, before the others of its key."""
        if request.state is RequestState.PREEMPTED:
            self.num_preempted += 1
        else:
            self._num_by_key[request.fairness_key] += 1
        priority = request.effective_priority
        if priority not in self._levels:
            self._levels[priority] = _Level(self._shares.of(priority), now_ns, self._waits_for_blocks)
        self._levels[priority].add(request, is_first)

    def peek(self, now_ns: int) -> Request | None:
        self._choose_turn(now_ns)
        return self._turn.peek() if self._turn is not None else None

    def pop(self, now_ns: int) -> Request:
        request = self.peek(now_ns)
        assert request is not None and self._turn is not None, "pop from an empty queue"
        is_old = self._turn.is_old(now_ns)
        self._turn.choose(request, now_ns)
        self.remove(request)
        if is_old:
            request.effective_priority = max(request.effective_priority, self._shares.highest)
        self._turn = None
        return request

    def remove(self, request: Request) -> None:
        """Remove a request without a turn; its key is not charged."""
        level = self._levels[request.effective_priority]
        level.take(request)
        if not len(level):
            del self._levels[request.effective_priority]
        if request.state is RequestState.PREEMPTED:
            self.num_preempted -= 1
            return
        self._num_by_key[request.fairness_key] -= 1
        if not self._num_by_key[request.fairness_key]:
            del self._num_by_key[request.fairness_key]

    def standing(self, now_ns: int) -> Standing | None:
        """Return the standing of the next request; None if nobody waits."""
        request = self.peek(now_ns)
        if request is None:
            return None
        assert self._turn is not None, "a request without a turn"
        if self._turn.is_old(now_ns):
            return Standing(False, self._turn.since_ns, 0.0, request.arrival)
        return Standing(True, -request.effective_priority, self._turn.served(request), request.arrival)

    def _choose_turn(self, now_ns: int) -> None:
        waiting = self._levels
        if not waiting:
            self._turn = None
            return
        highest, turn = waiting[max(waiting)], self._turn
        if turn is not None and len(turn) and (turn is highest or self._turn_is_due_to_age):
            return
        oldest = min(waiting.values(), key=lambda level: level.since_ns)
        self._turn_is_due_to_age = oldest is not highest and oldest.is_old(now_ns)
        self._turn = oldest if self._turn_is_due_to_age else highest


class _Level:
    """The requests of one class."""

    def __init__(self, shares: Shares, now_ns: int, keeps_next: bool) -> None:
        self.since_ns = now_ns
        """Time of its last turn, or of its first waiting request."""
        self._shares = shares
        self._keeps_next = keeps_next
        self._preempted: list[Request] = []
        self._by_key: dict[str, deque[Request]] = {}
        self._head: Request | None = None

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for requests in self._by_key.values():
            yield from requests

    def is_old(self, now_ns: int) -> bool:
        """Whether it has waited so long for a turn that it gets the next one."""
        return now_ns - self.since_ns >= AGEING_NS

    def served(self, request: Request) -> float:
        """Return the tokens served to a request's key; a preempted request goes before all keys."""
        return -1.0 if request.state is RequestState.PREEMPTED else self._shares.served(request.fairness_key)

    def add(self, request: Request, is_first: bool) -> None:
        if request.state is RequestState.PREEMPTED:
            self._preempted.append(request)
            self._preempted.sort(key=lambda preempted: preempted.arrival)
            return
        key = request.fairness_key
        if key not in self._by_key:
            self._shares.arrive(key, self._by_key)
            self._by_key[key] = deque()
        if is_first:
            self._by_key[key].appendleft(request)
        else:
            self._by_key[key].append(request)

    def peek(self) -> Request:
        if self._preempted:
            return self._preempted[0]
        if self._head is None or not self._keeps_next:
            heads = (requests[0] for requests in self._by_key.values())
            self._head = min(heads, key=lambda head: (self._shares.served(head.fairness_key), head.arrival))
        return self._head

    def choose(self, request: Request, now_ns: int) -> None:
        """Give this request the turn. A preempted request had its turn before: the others go on waiting for theirs."""
        is_preempted = request.state is RequestState.PREEMPTED
        if not is_preempted or not self._by_key:
            self.since_ns = now_ns
        if not is_preempted:
            self._shares.choose(request.fairness_key)

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

"""What a worker can take beside the requests that it has got, by its engine's stats and by what has come since.

A decode worker's room is memory: blocks of its pool. A prefill worker's is time: what it computes soon.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import EngineStats, Mode
from tandem_runtime.errors import Overloaded, TandemError
from tandem_worker.grants import Room
from tandem_worker.requests import ActiveRequest

_QUEUED_SHARE = 8
"""An eighth as many requests as run at once may wait here, so that a free seat is taken in the next step."""
FULL_SECONDS = 0.5
"""After the engine has refused a request, no room as large is granted for so long, unless a request ends before."""
_WINDOW_SECONDS = 0.5
"""A prefill worker is granted so much work: enough until more comes, and all else waits in a fair order."""
_FIRST_WINDOW_TOKENS = 4096
"""Before its rate is known."""
_OLD_WEIGHT = 0.95
"""Of earlier steps in a moving average."""


class WorkerRoom(ABC):
    """The room of one worker; `now` is in monotonic seconds."""

    def __init__(self, num_places: int) -> None:
        """`num_places`: requests that it may have at once."""
        self._num_places = num_places
        self._slow_start = SlowStart(num_places)
        self._stats: EngineStats | None = None
        self._block_size = 0
        self._num_requests = 0
        self._unseen: dict[str, int] = {}
        """Tokens of requests that are not in `stats` yet, by request key."""
        self._reserved: set[str] = set()
        """Requests that the engine has accepted since the last stats, and that will be in the next ones."""
        self._without_token: dict[str, int] = {}
        """Tokens of requests that have no first token yet, by request key."""
        self._full_until, self._refused_tokens = 0.0, 0

    @abstractmethod
    def room(self, now: float) -> Room:
        """Return what the worker can take beside what it has got."""

    @property
    @abstractmethod
    def seen_mode(self) -> Mode:
        """The requests that are in the stats as soon as the engine has accepted them; others once they run."""

    def opened(self, stats: EngineStats, block_size: int) -> None:
        """The worker is ready."""
        self._stats, self._block_size = stats, block_size

    def began(self, request: ActiveRequest) -> None:
        """The engine is about to get a request."""
        self._num_requests += 1
        self._unseen[request.key] = self._without_token[request.key] = num_tokens_of(request.submit)

    def reserved(self, request: ActiveRequest, mode: Mode) -> None:
        """The engine has accepted a request."""
        if mode == self.seen_mode:
            self._reserved.add(request.key)

    def refused(self, request: ActiveRequest, error: TandemError, now: float) -> None:
        """The engine has refused a request, which has ended: what it keeps for others is not in its stats.

        A request that is wrong, or larger than the whole pool, says nothing of the worker's room.
        """
        num_pool_tokens = self._stats.num_total_blocks * self._block_size if self._stats is not None else 0
        is_full = isinstance(error, Overloaded) and num_tokens_of(request.submit) <= num_pool_tokens
        if self._num_requests and is_full:
            self._full_until, self._refused_tokens = now + FULL_SECONDS, num_tokens_of(request.submit)

    def answered(self, request: ActiveRequest) -> None:
        """A step has computed tokens of a request's answer."""
        if self._without_token.pop(request.key, None) is not None:
            self._unseen.pop(request.key, None)
            self._slow_start.first_token()

    def ended(self, request: ActiveRequest) -> None:
        self._num_requests -= 1
        self._unseen.pop(request.key, None)
        self._reserved.discard(request.key)
        self._without_token.pop(request.key, None)
        self._full_until = 0.0

    def stepped(self, stats: EngineStats, admitted: Iterable[str]) -> None:
        """A step has ended, with these stats. Requests that were `admitted` have left the engine's queue."""
        self._stats = stats
        for key in (*self._reserved, *admitted):
            self._unseen.pop(key, None)
        self._reserved.clear()

    def _num_free_places(self) -> int:
        return max(0, self._slow_start.bound(self._num_places - self._num_requests, len(self._without_token)))


class PoolRoom(WorkerRoom):
    """Of a decode worker: the blocks that are free or cached, and the seats."""

    def __init__(self, max_num_seqs: int) -> None:
        """`max_num_seqs`: requests that run at once."""
        super().__init__(max_num_seqs + max(1, max_num_seqs // _QUEUED_SHARE))

    @property
    def seen_mode(self) -> Mode:
        """Hand-overs: they have their blocks when they are accepted."""
        return "decode"

    def room(self, now: float) -> Room:
        stats = self._stats
        if stats is None:
            return Room(0, 0)
        num_growing = self._num_requests - len(self._unseen)
        num_free = (stats.num_free_blocks + stats.num_cached_blocks - num_growing) * self._block_size
        num_free -= sum(self._unseen.values())
        if now < self._full_until:
            num_free = min(num_free, self._refused_tokens - 1)
        return Room(
            max(0, num_free),
            self._num_free_places(),
            tokens_per_request=2 * self._block_size,
            most_tokens=stats.num_total_blocks * self._block_size,
            takes_any=not self._num_requests,
        )


class PromptRoom(WorkerRoom):
    """Of a prefill worker: what it computes in half a second, less what it has not computed yet.

    A prompt that takes longer is taken once half of that, or less, is left to compute: so the worker always has work,
    and its queue is not longer than one such prompt and a quarter of a second.
    """

    def __init__(self, max_num_seqs: int, max_num_waiting: int, step_tokens: int) -> None:
        """`max_num_waiting`: most requests that its engine queues. `step_tokens`: most that one step computes."""
        super().__init__(max(1, min(max_num_seqs + max(1, max_num_seqs // _QUEUED_SHARE), max_num_waiting)))
        self._step_tokens = step_tokens
        self._num_computed = self._num_seconds = 0.0

    @property
    def seen_mode(self) -> Mode:
        return "prefill"

    @property
    def window(self) -> int:
        """Tokens that may be left to compute."""
        num_tokens = _FIRST_WINDOW_TOKENS
        if self._num_seconds:
            num_tokens = round(_WINDOW_SECONDS * self._num_computed / self._num_seconds)
        return max(num_tokens, 2 * self._step_tokens)

    def stepped(self, stats: EngineStats, admitted: Iterable[str]) -> None:
        last = self._stats
        super().stepped(stats, admitted)
        if last is not None:
            num_computed, num_seconds = (
                stats.counters.get(name, 0.0) - last.counters.get(name, 0.0)
                for name in ("prompt_tokens_computed", "step_seconds")
            )
            if num_computed > 0 and num_seconds > 0:
                self._num_computed = _OLD_WEIGHT * self._num_computed + num_computed
                self._num_seconds = _OLD_WEIGHT * self._num_seconds + num_seconds

    def room(self, now: float) -> Room:
        stats = self._stats
        if stats is None:
            return Room(0, 0)
        window, num_left = self.window, self._num_left(stats)
        is_refusing = now < self._full_until
        return Room(
            0 if is_refusing else max(0, window - num_left),
            0 if is_refusing else self._num_free_places(),
            most_tokens=stats.num_total_blocks * self._block_size,
            takes_any=not is_refusing and 2 * num_left <= window,
            in_order=True,
        )

    def _num_left(self, stats: EngineStats) -> int:
        """Return the tokens left to compute, at most.

        The stats know how far each prompt is, and not yet what is cached of those that wait; gateways say that, by
        what they know.
        """
        return min(stats.num_tokens_in_flight + sum(self._unseen.values()), sum(self._without_token.values()))


def num_tokens_of(submit: pb.Submit) -> int:
    """Return what a request counts: as its gateway does, or else its whole prompt."""
    return submit.grant_tokens if submit.HasField("grant_tokens") else len(submit.token_ids)


class SlowStart:
    """Bounds how many requests a new worker may have without a first token: a few at first, twice as many with each."""

    NUM_AT_FIRST = 4

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._limit = self.NUM_AT_FIRST

    @property
    def is_over(self) -> bool:
        return self._limit >= self._num_places

    def first_token(self) -> None:
        self._limit = min(self._num_places, 2 * self._limit)

    def bound(self, num_requests: int, num_without_token: int) -> int:
        """Return how many requests may come, of `num_requests` that there is room for."""
        return num_requests if self.is_over else max(0, min(num_requests, self._limit - num_without_token))

"""Decides whether a request may start, wait or be sent again.

A new request passes `Quarantine.check`, waits in its model's room while every worker of the model is full
(`admission_queue.py`), and takes a permit of the `RetryBudget` each time it is sent again after the loss of a worker.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from control_plane.generation import TokenIds, TokenRequest
from tandem_runtime.errors import Aborted, Overloaded, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_SHARE_OF_REQUESTS = 0.2
_BURST = 100
_BURST_SECONDS = 10.0

MAX_DEATHS_IN_A_ROW = 3
"""Workers that died with a choice since its last new token. A new token between two deaths clears the request."""
MAX_DEATHS = 10
"""Workers that died with a choice in all, with or without new tokens in between."""
_QUARANTINE_SECONDS = 600.0
_MAX_QUARANTINED_PROMPTS = 1000


_LOOK_AGAIN_SECONDS = 0.05
"""After a worker has refused: what has ended there meanwhile may have made room."""


class NoRoom(Overloaded):
    """No worker is expected to have room: the request was sent to none."""


class NoPermit(Overloaded):
    """The retry budget is spent; a permit comes after `retry_after_seconds`."""


def look_again_seconds(refusal: TandemError) -> float | None:
    """Return when a request that was refused may look for room again although nothing has changed; None: not before.

    A permit of the budget comes with time. After a worker's refusal it looks once more, and is sent only if one of this
    gateway's calls there has ended since.
    """
    if isinstance(refusal, NoPermit):
        return refusal.retry_after_seconds
    return _LOOK_AGAIN_SECONDS if isinstance(refusal, Overloaded) and not isinstance(refusal, NoRoom) else None


class RetryBudget:
    """A token bucket that keeps a crash loop from multiplying the load.

    The bucket gains 0.2 permits per new request and 100 per 10 seconds; it holds 100. The first loss of each request
    or choice needs no permit: load at most doubles, and a worker that dies with hundreds of streams stops none of them.
    """

    def __init__(self, burst: int = _BURST, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._clock = clock
        self._num_left = float(burst)
        self._filled_at = clock()

    def earn(self) -> None:
        """Add the share of a new request."""
        self._fill(_SHARE_OF_REQUESTS)

    def take(self, *, is_first: bool) -> None:
        """Spend a permit unless this is the first loss; raises Overloaded while there is no permit."""
        self._fill(0.0)
        if is_first:
            return
        if self._num_left < 1:
            raise NoPermit(
                "too many requests have lost their workers and are being sent again; try again later",
                retry_after_seconds=_BURST_SECONDS / self._burst,
            )
        self._num_left -= 1

    def _fill(self, earned: float) -> None:
        now = self._clock()
        earned += (now - self._filled_at) * self._burst / _BURST_SECONDS
        self._filled_at = now
        self._num_left = min(float(self._burst), self._num_left + earned)


class Quarantined(Aborted):
    """Raised by the gateway only: another attempt would cost the next worker."""


class Quarantine:
    """Remembers the latest prompts that killed workers, by account; a bounded number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def check(self, request: TokenRequest) -> None:
        """Raise Quarantined if this prompt of this account is in quarantine. Probes are never quarantined."""
        while self._until and next(iter(self._until.values()))[0] <= self._clock():
            self._until.popitem(last=False)
        if self._until and not request.is_probe and (found := self._until.get(_key(request))):
            raise Quarantined(found[1])

    def put(self, request: TokenRequest) -> Quarantined:
        """Quarantine a prompt unless a probe sent it; return the client's error."""
        error = Quarantined(
            f"the request was running on three workers as each of them died; it is quarantined: this prompt is "
            f"refused for {_QUARANTINE_SECONDS / 60:g} minutes; change it, or have an operator look at the workers' "
            "logs"
        )
        log.error("request_quarantined", request_id=request.request_id, account=request.account)
        if not request.is_probe:
            key = _key(request)
            self._until[key] = (self._clock() + _QUARANTINE_SECONDS, error.message)
            self._until.move_to_end(key)
            if len(self._until) > _MAX_QUARANTINED_PROMPTS:
                self._until.popitem(last=False)
        return error


def _key(request: TokenRequest) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (request.account.encode(), request.model_id.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    token_ids = request.token_ids
    digest.update((token_ids if isinstance(token_ids, TokenIds) else TokenIds(token_ids)).packed())
    return digest.digest()

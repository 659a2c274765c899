"""What a worker has granted to this gateway on one Attach stream, and what was sent on it."""

from __future__ import annotations

from dataclasses import dataclass

NUM_WITHOUT_GRANT = 4
"""Requests that may be sent to a worker whose last grant has expired, until it grants again."""


@dataclass(frozen=True)
class Grant:
    """How much may have been sent since the stream began."""

    number: int
    num_tokens: int
    num_requests: int
    valid_seconds: float


@dataclass(frozen=True)
class GrantLeft:
    """What a grant left of itself before a request was sent."""

    number: int
    num_tokens: int
    num_requests: int


@dataclass(eq=False)
class Attachment:
    """Of one stream: a new stream begins with a new one. `now` is in monotonic seconds."""

    grant: Grant | None = None
    """The latest; None: the worker has granted nothing, as those of earlier releases never do."""
    num_tokens: int = 0
    """Sent since the stream began."""
    num_requests: int = 0
    _until: float = 0.0
    _num_without: int = 0

    def granted(self, grant: Grant, now: float) -> bool:
        """Take in a grant; return whether it is lower than the one before: the worker waits to hear that it came."""
        last, self.grant = self.grant, grant
        self._until, self._num_without = now + grant.valid_seconds, 0
        return last is not None and (grant.num_tokens < last.num_tokens or grant.num_requests < last.num_requests)

    def sent(self, num_tokens: int, now: float) -> GrantLeft | None:
        """Count a request; return what the grant left before; None: there is none that has not expired."""
        before = self.left() if self.is_live(now) else None
        self.num_tokens += num_tokens
        self.num_requests += 1
        self._num_without += before is None
        return before

    def is_live(self, now: float) -> bool:
        """Whether there is a grant that has not expired."""
        return self.grant is not None and now < self._until

    def has_room(self, num_tokens: int, num_requests: int, now: float) -> bool | None:
        """Return whether requests are within the grant; None: there is none, and the caller estimates."""
        if self.grant is None:
            return None
        if not self.is_live(now):
            few = not self._num_without or self._num_without + num_requests <= NUM_WITHOUT_GRANT
            return None if few else False
        left = self.left()
        return left is not None and num_tokens <= left.num_tokens and num_requests <= left.num_requests

    def left(self) -> GrantLeft | None:
        """Return what the last grant leaves, whether it has expired or not."""
        grant = self.grant
        if grant is None:
            return None
        num_tokens, num_requests = grant.num_tokens - self.num_tokens, grant.num_requests - self.num_requests
        return GrantLeft(grant.number, max(0, num_tokens), max(0, num_requests))

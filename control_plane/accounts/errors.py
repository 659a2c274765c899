"""Which refusals concern the caller rather than the request?

They are HTTP's alone: no worker sends them. control_plane.api.http.errors has their statuses and codes.
"""

from __future__ import annotations

from control_plane.accounts.limits import RateLimitStatus
from tandem_runtime.errors import InvalidRequest, Overloaded, Unauthenticated


class NotAllowed(Unauthenticated):
    """The token is good, but not for this."""


class NoSuchThing(InvalidRequest):
    """The account or token that is asked for is not there."""


class AlreadyThere(InvalidRequest):
    """What is to be made exists."""


class LimitReached(Overloaded):
    """The account has used up what it may use in a minute or at once."""

    statuses: tuple[RateLimitStatus | None, RateLimitStatus | None] = (None, None)
    """Of requests and of tokens, as they are told to the caller."""

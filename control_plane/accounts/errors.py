"""Errors about accounts, tokens and limits.

Only the gateway raises these errors, never a worker. control_plane.api.http.errors has their statuses and codes.
"""

from __future__ import annotations

from control_plane.accounts.limits import RateLimitStatus
from tandem_runtime.errors import InvalidRequest, Overloaded, Unauthenticated


class NotAllowed(Unauthenticated):
    """The token is valid, but does not permit this request."""


class NoSuchThing(InvalidRequest):
    """The requested account or token does not exist."""


class AlreadyThere(InvalidRequest):
    """The account to create already exists."""


class LimitReached(Overloaded):
    """The account has reached a limit per minute or of concurrent requests."""

    statuses: tuple[RateLimitStatus | None, RateLimitStatus | None] = (None, None)
    """Of requests and of tokens, for the response headers."""

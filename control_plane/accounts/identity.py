"""Who sends a request: the account and its token, and the request's options that do not concern its text."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.accounts.limits import NO_LIMITS, Limits
from control_plane.accounts.tokens import Token
from control_plane.explain.timeline import Timeline


@dataclass(frozen=True)
class Identity:
    """The account and token of a request."""

    account: str
    token: Token | None = None
    """None while no account exists: then every request is permitted."""
    limits: Limits = NO_LIMITS

    @property
    def is_admin(self) -> bool:
        return self.token is None or self.token.may("admin")


@dataclass(frozen=True)
class Caller:
    """The sender of a request, with its options for routing, waiting and response headers."""

    request_id: str
    account: str = "default"
    session_affinity: str = ""
    service_tier: str = ""
    """Of the request's header; "": not sent."""
    reject_if_busy: bool = False
    timeout_seconds: float | None = None
    """None for the service's own timeout, which is also the maximum."""
    identity: Identity | None = None
    """The authenticated identity; None without accounts: then no limit holds."""
    answer_headers: dict[str, str] = field(default_factory=dict, compare=False)
    """Headers to add to the response; the phases of a request add theirs."""
    timeline: Timeline | None = field(default=None, compare=False, repr=False)
    """Of the HTTP request; None: the request came from elsewhere."""

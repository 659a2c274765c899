"""Who sends a request: the account, its token, and what the caller asks for beside text."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.accounts.limits import NO_LIMITS, Limits
from control_plane.accounts.tokens import Token


@dataclass(frozen=True)
class Identity:
    """Who calls, as whom."""

    account: str
    token: Token | None = None
    """None where no account has been made: then everybody may do everything."""
    limits: Limits = NO_LIMITS

    @property
    def token_id(self) -> str | None:
        return self.token.id if self.token else None

    @property
    def is_admin(self) -> bool:
        return self.token is None or self.token.may("admin")


@dataclass(frozen=True)
class Caller:
    """Who asks, and what they want besides text."""

    request_id: str
    account: str = "default"
    session_affinity: str = ""
    reject_if_busy: bool = False
    timeout_seconds: float | None = None
    """None: the service's own, which is also the longest."""
    identity: Identity | None = None
    """Who was let in; None: nobody asks for tokens, and nobody is limited."""
    answer_headers: dict[str, str] = field(default_factory=dict, compare=False)
    """What the answer's head is to say besides, as it becomes known."""

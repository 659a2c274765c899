"""Remembers which share of its prompts an account, or a session, usually finds in a cache."""

from __future__ import annotations

from collections import OrderedDict

_OLD_WEIGHT = 0.8
_MAX_KEPT = 10_000


class CachedShares:
    """Shares from 0 to 1 of one model, by session or account; a bounded number."""

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._shares: OrderedDict[tuple[str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    def finished(self, account: str, session: str, num_cached_tokens: int, num_prompt_tokens: int) -> None:
        """Take in a request whose prompt was read. `session`: "" for none."""
        if num_prompt_tokens > 0:
            share = num_cached_tokens / num_prompt_tokens
            self._mix(("account", account), share)
            if session:
                self._mix(("session", session), share)

    def of(self, account: str, session: str) -> float:
        """Return the share that is usual for the session, else for the account; 0 if neither is known."""
        known = self._shares.get(("session", session)) if session else None
        return known if known is not None else self._shares.get(("account", account), 0.0)

    def _mix(self, key: tuple[str, str], share: float) -> None:
        old = self._shares.get(key)
        self._shares[key] = share if old is None else _OLD_WEIGHT * old + (1 - _OLD_WEIGHT) * share
        self._shares.move_to_end(key)
        if len(self._shares) > self._max_kept:
            self._shares.popitem(last=False)

"""What waits for a model at other gateways, and what they let in, as the workers' grants tell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AccountTurn:
    """An account that waits anywhere, or has been served lately, in one class. Work is in tokens of an answer."""

    account: str
    service_class: int
    lead: float
    """What the account has used of the worker beyond the one that has used least, of those of the class that wait."""
    num_requests: int
    """Those that wait at other gateways."""
    work: float
    work_per_second: float
    """That the worker has been sent of it from there lately."""


@dataclass(frozen=True)
class LetIn:
    """Requests of other gateways, and their work."""

    work: float = 0.0
    num_requests: int = 0


_KEPT_SECONDS = 2.5
"""What a worker has told holds for so long: a grant is renewed before it ends after 2 s."""


@dataclass
class Elsewhere:
    """Of one model."""

    _turns: dict[str, dict[tuple[int, str], AccountTurn]] = field(default_factory=dict)
    """By worker; the latest are last."""
    _told_at: float = -math.inf
    _let_in: dict[str, LetIn] = field(default_factory=dict)
    """Since the stream to the worker began."""

    def take(self, worker: str, turns: Iterable[AccountTurn], let_in: LetIn, now: float) -> LetIn:
        """Take in what a worker tells, in place of what it has told before. Return what was let in since then."""
        self._turns.pop(worker, None)
        if found := {(each.service_class, each.account): each for each in turns}:
            self._turns[worker], self._told_at = found, now
        before, self._let_in[worker] = self._let_in.get(worker, let_in), let_in
        if let_in.num_requests < before.num_requests:  # a new stream
            return LetIn()
        return LetIn(let_in.work - before.work, let_in.num_requests - before.num_requests)

    def forget(self, worker: str) -> None:
        self._turns.pop(worker, None)
        self._let_in.pop(worker, None)

    def leads(self) -> dict[int, dict[str, float]]:
        """Return the accounts' leads at all workers together, by class."""
        leads: dict[int, dict[str, float]] = {}
        for turns in self._turns.values():
            for (service_class, account), turn in turns.items():
                of_class = leads.setdefault(service_class, {})
                of_class[account] = of_class.get(account, 0.0) + turn.lead
        return leads

    def work_per_second(self, now: float) -> dict[tuple[int, str], float]:
        """Return what other gateways send of each class and account, to all workers together."""
        found: dict[tuple[int, str], float] = {}
        for turns in self._turns.values() if now - self._told_at < _KEPT_SECONDS else ():
            for asker, turn in turns.items():
                found[asker] = found.get(asker, 0.0) + turn.work_per_second
        return found

    def waiting(self, now: float) -> dict[tuple[int, str], AccountTurn]:
        """Return what waits, by class and account: all workers hear of the same requests, one of them lately."""
        return next(reversed(self._turns.values()), {}) if now - self._told_at < _KEPT_SECONDS else {}

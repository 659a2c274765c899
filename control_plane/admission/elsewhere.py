"""What waits for a model at other gateways, and what they let in, as the workers' grants tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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


_UNITS = 1000
"""Of a token of work: sums of whole numbers are exact, whatever is added and taken away again."""
_MOST = 1e15


@dataclass
class _Sum:
    """Of one class and account, over all workers that tell of it."""

    num_workers: int = 0
    lead: int = 0
    work_per_second: int = 0

    def add(self, turn: AccountTurn, sign: int) -> None:
        self.num_workers += sign
        self.lead += sign * _units(turn.lead)
        self.work_per_second += sign * _units(turn.work_per_second)


@dataclass
class Elsewhere:
    """Of one model. A grant costs what it tells, and a question what there is of accounts, however many workers."""

    _turns: dict[str, dict[tuple[int, str], AccountTurn]] = field(default_factory=dict)
    """By worker; the latest are last."""
    _sums: dict[tuple[int, str], _Sum] = field(default_factory=dict)
    _told_at: float = -math.inf
    _let_in: dict[str, LetIn] = field(default_factory=dict)
    """Since the stream to the worker began."""

    def take(self, worker: str, turns: Iterable[AccountTurn], let_in: LetIn, now: float) -> LetIn:
        """Take in what a worker tells, in place of what it has told before. Return what was let in since then."""
        self._add(self._turns.pop(worker, {}), -1)
        if found := {(each.service_class, each.account): each for each in turns}:
            self._turns[worker], self._told_at = found, now
            self._add(found, 1)
        before, self._let_in[worker] = self._let_in.get(worker, let_in), let_in
        if let_in.num_requests < before.num_requests:  # a new stream
            return LetIn()
        return LetIn(let_in.work - before.work, let_in.num_requests - before.num_requests)

    def forget(self, worker: str) -> None:
        self._add(self._turns.pop(worker, {}), -1)
        self._let_in.pop(worker, None)

    def leads(self) -> dict[int, dict[str, float]]:
        """Return the accounts' leads at all workers together, by class."""
        leads: dict[int, dict[str, float]] = {}
        for (service_class, account), total in self._sums.items():
            leads.setdefault(service_class, {})[account] = total.lead / _UNITS
        return leads

    def work_per_second(self, now: float) -> dict[tuple[int, str], float]:
        """Return what other gateways send of each class and account, to all workers together."""
        if now - self._told_at >= _KEPT_SECONDS:
            return {}
        return {asker: total.work_per_second / _UNITS for asker, total in self._sums.items()}

    def waiting(self, now: float) -> dict[tuple[int, str], AccountTurn]:
        """Return what waits, by class and account: all workers hear of the same requests, one of them lately."""
        return next(reversed(self._turns.values()), {}) if now - self._told_at < _KEPT_SECONDS else {}

    def _add(self, turns: Mapping[tuple[int, str], AccountTurn], sign: int) -> None:
        for asker, turn in turns.items():
            total = self._sums.setdefault(asker, _Sum())
            total.add(turn, sign)
            if not total.num_workers:
                del self._sums[asker]


def _units(value: float) -> int:
    """Return a number of tokens in thousandths; 0 for what is no number."""
    return round(_UNITS * min(max(0.0, value), _MOST))

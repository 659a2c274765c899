"""Is it worth asking a second, smaller model how answers go on, which of them, and for how many tokens?

Asking takes seconds of its own, before the step: so many rounds, each one token further for all that are asked. It pays
if the step with the tokens that should come true, and with those seconds, brings more per second than the step without,
and a margin more. What a round takes is measured, and how often each request's proposals were right. Where asking does
not pay it ends, but for a small share of the time, in which a round shows whether that is still so.

Before its first proposal for a request, and after others guessed for a while, the model has tokens to catch up with:
worth it if what is saved by the answer's end should be more than that takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.acceptance import Acceptance, Rates
from tandem_engine.scheduling.speculation.drafters import Guess
from tandem_engine.scheduling.speculation.ngrams import FIRM
from tandem_engine.scheduling.speculation.proposal_cost import ProposalCost

log = logging.getLogger(__name__)

MAX_CATCH_UP_TOKENS = 256
"""That a draft model computes at most before its first round of a step, those of all requests together."""
_FEW_TOKENS = 8  # to catch up with, as between two steps: not worth weighing
_NUM_AGREED = 2  # where the rates of proposals begin, so that each of the first few has its own
_MARGIN = 0.03
_NUM_TRIALS = 32  # calls before which what a round takes must be known, or asking has to be paid for like probes
_LEAST_STEPS_RESTED = 8  # once it does not pay: thinking of it takes some percent of a short step
_MOST_STEPS_RESTED = 64
_NUM_STEPS_BEFORE = 4  # without asking, the first of which are slow: what it would save must be known
_NUM_ASKED = 32  # times, before a step without shows that anew: the rest say little of it
_PROBED_SHARE = 0.005  # of the time, while asking does not pay
_MOST_SAVED_STEPS = 8.0  # of that share
_LIKELY_TOKENS = 128  # that an answer goes on for, if its limit allows


class DraftModel(Protocol):
    """What proposes tokens; computes between the steps of the model whose tokens count."""

    def num_missing(self, request: Request) -> int | None:
        """Return how many of its tokens are to be computed before the first proposal; None: there can be none now."""
        ...

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Return up to so many tokens that may follow each request's; there are slots for them behind its own.

        At most MAX_CATCH_UP_TOKENS are computed before; requests that lack more are not in the answer.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request is over."""
        ...


class Plan(Protocol):
    """A step as it is to be: what it should bring, and what it should take."""

    @property
    def num_tokens(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    @property
    def seconds_each(self) -> float:
        """That each guess adds."""
        ...


class Proposal(NamedTuple):
    guess: Guess
    acceptance: Acceptance


class _Candidate(NamedTuple):
    request: Request
    num_missing: int
    num_left: int
    """Tokens that the answer may still have."""
    chances: Sequence[float]


class ModelDrafter:
    """Decides when to ask a draft model, and learns from what became of its proposals."""

    def __init__(self, model: DraftModel, timer: Callable[[], float]) -> None:
        self._model: DraftModel | None = model
        self._timer = timer
        self._rates = Rates()
        self._acceptances: dict[Request, Acceptance] = {}
        self._cost = ProposalCost()
        self._saved_seconds = 0.0
        self._num_resting = _NUM_STEPS_BEFORE + 1
        self._num_steps_since = self._num_asked = 0

    @property
    def is_on(self) -> bool:
        """Whether it has not broken."""
        return self._model is not None

    def rests(self) -> bool:
        """Whether not even to think of asking in this step.

        Where that did not pay lately it still will not; and now and then a step has to show what one without takes.
        """
        self._num_steps_since += 1
        self._num_resting -= self._num_resting > 0
        return self._num_resting > 0

    def choose(self, limits: Mapping[Request, tuple[int, int]], without: Plan, others: Plan) -> dict[Request, int]:
        """Return whom to ask about, and for how many tokens each; nobody: it would not pay.

        `limits` has for each request the most guesses, and how many tokens its answer may still have. `without` is the
        step as it would be without asking, `others` the same without these requests' guesses.
        """
        candidates = self._candidates(limits)
        if not candidates:
            return {}
        fewest = min(candidates, key=lambda each: each.num_missing)
        self._save(without.seconds)
        if not self._cost.is_known:
            seconds = self._cost.catch_up_seconds(min(fewest.num_missing, MAX_CATCH_UP_TOKENS))
            is_tried = self._cost.num_calls < _NUM_TRIALS or self._can_spend(seconds)
            return {fewest.request: 1} if is_tried else {}
        asked, num_rounds = max(_ways(candidates), key=lambda way: self._rate(way[0], way[1], others))
        usual_rate = without.num_tokens / without.seconds
        if self._rate(asked, num_rounds, others) > (1 + _MARGIN) * usual_rate:
            each = others.seconds_each + self._cost.round_seconds(len(asked)) / len(asked)
            return {
                candidate.request: min(num_rounds, len(candidate.chances))
                for candidate in asked
                if self._is_worth_catching_up(candidate, num_rounds, each, usual_rate)
            }
        probed = [each for each in asked if each.num_missing <= _FEW_TOKENS] or [fewest]
        seconds = self._cost.seconds(len(probed), 1, min(probed[0].num_missing, MAX_CATCH_UP_TOKENS))
        seconds += len(probed) * others.seconds_each
        if not self._can_spend(seconds):
            self._num_resting = self._num_steps_to_save(seconds, without.seconds)
            return {}
        return {each.request: 1 for each in probed}

    def ask(self, wanted: Mapping[Request, int]) -> tuple[dict[Request, Proposal], float]:
        """Return what it proposes and the seconds it took; a model that breaks is not asked again."""
        assert self._model is not None, "a draft model that broke is asked"
        self._num_asked += 1
        if self._num_asked % _NUM_ASKED == 0:
            self._num_resting = 2
        num_missing = sum(self._model.num_missing(request) or 0 for request in wanted)
        started = self._timer()
        try:
            proposed = self._model.propose(wanted)
        except Exception as error:  # noqa: BLE001 - no request needs a guess, whatever it is
            log.error("the draft model is switched off: %s: %s", type(error).__name__, error)
            self._model = None
            self._acceptances.clear()
            return {}, self._timer() - started
        seconds = self._timer() - started
        num_rounds = max((len(token_ids) for token_ids in proposed.values()), default=0)
        self._cost.observe(len(proposed), num_rounds, min(num_missing, MAX_CATCH_UP_TOKENS), seconds)
        return {
            request: Proposal(_guess(token_ids), self._acceptances[request])
            for request, token_ids in proposed.items()
            if token_ids
        }, seconds

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._acceptances.pop(request, None)
        if self._model is not None:
            self._model.forget(request)

    def _save(self, step_seconds: float) -> None:
        self._saved_seconds += _PROBED_SHARE * step_seconds * self._num_steps_since
        self._num_steps_since = 0
        self._saved_seconds = min(self._saved_seconds, _MOST_SAVED_STEPS * step_seconds)

    def _can_spend(self, seconds: float) -> bool:
        if seconds > self._saved_seconds:
            return False
        self._saved_seconds -= seconds
        return True

    def _num_steps_to_save(self, seconds: float, step_seconds: float) -> int:
        """Return after how many steps so much could be spent, within the limits of a rest."""
        num_steps = (seconds - self._saved_seconds) / (_PROBED_SHARE * step_seconds)
        return int(min(max(num_steps, _LEAST_STEPS_RESTED), _MOST_STEPS_RESTED))

    def _candidates(self, limits: Mapping[Request, tuple[int, int]]) -> list[_Candidate]:
        """Return whom it could propose anything for, the likeliest to be right first."""
        assert self._model is not None, "a draft model that broke is asked"
        candidates = []
        for request, (max_tokens, num_left) in limits.items():
            num_missing = self._model.num_missing(request)
            if max_tokens > 0 and num_missing is not None:
                if request not in self._acceptances:
                    self._acceptances[request] = Acceptance(self._rates)
                chances = self._acceptances[request].chances(_guess(range(max_tokens)), 0.0)
                candidates.append(_Candidate(request, num_missing, num_left, chances))
        return sorted(candidates, key=lambda each: -each.chances[0])

    def _rate(self, asked: Sequence[_Candidate], num_rounds: int, others: Plan) -> float:
        """Return the tokens per second of a step in which all of them have proposals."""
        num_guesses = sum(min(num_rounds, len(each.chances)) for each in asked)
        num_right = sum(sum(each.chances[:num_rounds]) for each in asked)
        seconds = num_rounds * self._cost.round_seconds(len(asked)) + num_guesses * others.seconds_each
        return (others.num_tokens + num_right) / (others.seconds + seconds)

    def _is_worth_catching_up(self, each: _Candidate, num_rounds: int, seconds_each: float, usual_rate: float) -> bool:
        if each.num_missing <= _FEW_TOKENS:
            return True
        num_right = sum(each.chances[:num_rounds])
        num_steps = min(each.num_left, _LIKELY_TOKENS) / (1 + num_right)
        saved_seconds = num_right / usual_rate - num_rounds * seconds_each
        return self._cost.catch_up_seconds(each.num_missing) < num_steps * saved_seconds


def _ways(candidates: Sequence[_Candidate]) -> Iterator[tuple[Sequence[_Candidate], int]]:
    """Yield who could be asked, and for how many rounds: all of them, the better half, the better quarter, ..."""
    num_asked = len(candidates)
    while num_asked:
        asked = candidates[:num_asked]
        for num_rounds in range(1, 1 + max(len(each.chances) for each in asked)):
            yield asked, num_rounds
        num_asked //= 2


def _guess(token_ids: Sequence[int]) -> Guess:
    return Guess(token_ids, _NUM_AGREED, [FIRM] * len(token_ids))

"""Which guesses are worth their row in the next step?

A guess pays while what it should bring, the chance that it is right, is to the seconds it adds as the tokens of the
step are to its seconds, and a margin more. What a step takes and what a guess adds to it is measured (`step_time`). So
guessing ends by itself where guesses are wrong, and in steps of so many answers that rows are dear. Where no text is
sure of what follows, a draft model may be asked, if there is one (`draft_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem_engine.scheduling.admission import max_kv_tokens
from tandem_engine.scheduling.batch import Batch, ScheduledRun
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.pacing import Pacer
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.speculation.acceptance import MOST_CHANCE, Acceptance, Rates
from tandem_engine.scheduling.speculation.draft_model import DraftModel, ModelDrafter
from tandem_engine.scheduling.speculation.drafters import Drafter, EarlierAnswers, Guess, OwnText
from tandem_engine.scheduling.speculation.rest import Gain, Rest
from tandem_engine.scheduling.step_time import work_of

_MARGIN = 0.1
_FIRST_SHARE = 1 / 16  # of a step's seconds, that a guess is thought to add before that was measured
_ASKED_AGAIN_AFTER = 64  # steps in which no guess could pay: what one adds is measured again, at one answer
_PRICED_STEPS = 8  # that go by one prediction
_SURE = 0.9  # who is as sure as this of a guess looks for no better one


class _Offer(NamedTuple):
    request: Request
    guess: Guess
    acceptance: Acceptance
    chances: list[float]
    is_asked: bool = False
    """It is the draft model's."""


_Looked = list[tuple[Request, _Offer | None]]


class Speculator:
    """Adds drafts to steps, and learns from what became of them."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, pacer: Pacer) -> None:
        self._config = config
        self._kv = kv
        self._pacer = pacer
        self._standings: dict[Request, _Standing] = {}
        self._tried: dict[Request, _Offer] = {}
        self._num_too_dear = 0
        self._num_priced = self._num_steps_priced = 0
        self._seconds: float | None = None
        self._seconds_each: float | None = None
        self._model: ModelDrafter | None = None
        self.use([OwnText(), EarlierAnswers()])

    def use(self, drafters: Sequence[Drafter]) -> None:
        """Guess by these; before the first request."""
        self._drafters = drafters
        self._rates = [Rates() for _ in drafters]
        self._gain = Gain()

    def use_model(self, model: DraftModel) -> None:
        """Ask this one, too; before the first request."""
        self._model = ModelDrafter(model, self._pacer.timer)

    def draft(self, batch: Batch, num_reserve_blocks: int) -> None:
        """Put guesses behind the answers of a step that has all else; they leave that many blocks to others."""
        self._tried.clear()
        if not self._config.max_draft_tokens or not batch.num_tokens_left:
            return
        standings, model = self._standings, self._model
        if model is not None and (not model.is_on or model.rests()):
            model = None
        awake = [
            run.request
            for run in batch.runs.values()
            if ((standing := standings.get(run.request)) is None or standing.rest.is_over(run.end)) and _is_answer(run)
        ]
        if not (awake or model):
            return
        runs = [run for run in batch.runs.values() if _is_answer(run)]
        is_beside_prompts = self._pacer.has_target and len(runs) < len(batch.runs)
        if not runs or is_beside_prompts or (step := self._step(runs)) is None:
            return
        if step.least_chance >= MOST_CHANCE:
            self._num_too_dear += 1
            if self._num_too_dear % _ASKED_AGAIN_AFTER:
                return
            step, awake, model = _Step(1, 1.0, _FIRST_SHARE), awake[:1], None
        least = step.least_chance
        looked: _Looked = [(request, self._offer(request, least)) for request in awake]
        if model is not None:
            looked = self._ask(model, looked, step, batch, num_reserve_blocks)
        self._add_best(looked, step, batch, num_reserve_blocks)

    def _step(self, runs: Sequence[ScheduledRun]) -> _Step | None:
        """Return what a step without guesses takes; None while nothing like it was measured."""
        if self._num_priced != len(runs) or self._num_steps_priced == _PRICED_STEPS:
            model = self._pacer.model
            self._num_priced, self._num_steps_priced = len(runs), 0
            self._seconds = model.predict(work_of(runs, self._config.window))
            self._seconds_each = model.draft_seconds()
        self._num_steps_priced += 1
        if not self._seconds:
            self._num_priced = 0
            return None
        each = _FIRST_SHARE * self._seconds if self._seconds_each is None else self._seconds_each
        return _Step(len(runs), self._seconds, each)

    def observe(self, run: ScheduledRun, num_drawn: int) -> None:
        """So many tokens were drawn for a run."""
        if run.draft_tokens:
            offer, num_right = self._tried.pop(run.request), num_drawn - 1
            offer.acceptance.observe(offer.guess, len(run.draft_tokens), num_right)
            if not offer.is_asked:
                self._standings[run.request].rest.looked(run.end + num_right, num_right)

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._standings.pop(request, None)
        self._tried.pop(request, None)
        if self._config.max_draft_tokens:
            for drafter in self._drafters:
                drafter.forget(request)
        if self._model is not None:
            self._model.forget(request)

    def _standing(self, request: Request) -> _Standing:
        standing = self._standings.get(request)
        if standing is None:
            sources = [(drafter, Acceptance(rates)) for drafter, rates in zip(self._drafters, self._rates, strict=True)]
            standing = self._standings[request] = _Standing(sources, Rest(self._gain))
        return standing

    def _offer(self, request: Request, least: float) -> _Offer | None:
        """Return the likeliest guess, if there is any."""
        max_tokens = min(self._config.max_draft_tokens, self._num_left(request))
        best: _Offer | None = None
        if max_tokens < 1:
            return best
        sources = self._standing(request).sources
        for source in sources:
            drafter, acceptance = source
            if guess := _before_stop(drafter.guess(request, max_tokens), request):
                chances = acceptance.chances(guess, least)
                if best is None or chances[0] > best.chances[0]:
                    best = _Offer(request, guess, acceptance, chances)
                if chances[0] > _SURE:
                    if source is not sources[0]:  # whoever was sure last is asked first
                        sources.remove(source)
                        sources.insert(0, source)
                    break
        return best

    def _num_left(self, request: Request) -> int:
        """Return how many guesses its slots would ever have room for."""
        return max_kv_tokens(request, self._config) - request.num_tokens

    def _ask(self, model: ModelDrafter, looked: _Looked, step: _Step, batch: Batch, num_reserve_blocks: int) -> _Looked:
        """Let the draft model guess where no text is sure, if that pays; what it takes is part of the step."""
        sure = [(request, offer) for request, offer in looked if offer and offer.chances[0] > _SURE]
        without, others = step.copy(), step.copy()
        _rank(looked, without)
        num_room = batch.num_tokens_left - sum(_rank(sure, others))
        of_texts = {request for request, _ in sure}
        limits = {
            run.request: (min(self._config.max_draft_tokens, self._num_left(run.request)), self._num_left(run.request))
            for run in batch.runs.values()
            if _is_answer(run) and run.request not in of_texts
        }
        wanted = {}
        for request, num_wanted in model.choose(limits, without, others).items():
            num_tokens = min(num_wanted, num_room)
            num_tokens = self._kv.room_for_drafts(request, num_tokens, num_reserve_blocks) if num_tokens else 0
            if num_tokens:
                wanted[request] = num_tokens
                num_room -= num_tokens
        if not wanted:
            return looked
        proposals, seconds = model.ask(wanted)
        self._pacer.copied(seconds)
        step.seconds += seconds
        asked = [
            (request, _Offer(request, guess, acceptance, acceptance.chances(guess, step.least_chance), is_asked=True))
            for request, (proposed, acceptance) in proposals.items()
            if (guess := _before_stop(proposed, request))
        ]
        return [*((request, offer) for request, offer in looked if request not in proposals or not offer), *asked]

    def _add_best(self, looked: _Looked, step: _Step, batch: Batch, num_reserve_blocks: int) -> None:
        """Add guesses, the likeliest first, as long as they pay."""
        for (request, offer), count in zip(looked, _rank(looked, step), strict=True):
            rest = self._standing(request).rest
            if offer and offer.is_asked:
                self._add(offer, max(1, count), batch, num_reserve_blocks)
            elif not offer or not self._add(offer, count or rest.num_probes, batch, num_reserve_blocks):
                rest.looked(request.num_tokens, 0)

    def _add(self, offer: _Offer, num_wanted: int, batch: Batch, num_reserve_blocks: int) -> int:
        num_tokens = min(num_wanted, batch.num_tokens_left)
        num_tokens = self._kv.room_for_drafts(offer.request, num_tokens, num_reserve_blocks) if num_tokens else 0
        if num_tokens:
            batch.add_drafts(offer.request, tuple(offer.guess.token_ids[:num_tokens]))
            self._tried[offer.request] = offer
        return num_tokens


def _is_answer(run: ScheduledRun) -> bool:
    return run.is_decode and run.request.mode != "prefill"


class _Standing(NamedTuple):
    """How the guesses of one request have done."""

    sources: list[tuple[Drafter, Acceptance]]
    """The one that was sure last comes first."""
    rest: Rest


def _rank(looked: Sequence[tuple[Request, _Offer | None]], step: _Step) -> list[int]:
    """Let guesses join a step, the likeliest first, as long as they pay; return of each offer how many do."""
    counts = [0] * len(looked)
    ranked = [(chance, -i) for i, (_, offer) in enumerate(looked) if offer for chance in offer.chances]
    for chance, number in sorted(ranked, reverse=True):
        if chance <= step.least_chance:
            break
        step.add(chance)
        counts[-number] += 1
    return counts


def _before_stop(guess: Guess | None, request: Request) -> Guess | None:
    """Return what is worth computing of a guess: nothing follows a stop token."""
    if guess is not None:
        for stop in request.sampling.stop_token_ids:
            if stop in guess.token_ids:
                guess = guess.cut(guess.token_ids.index(stop))
    return guess if guess is not None and guess.token_ids else None


class _Step:
    """A step as it grows: what it should bring, and what it should take."""

    def __init__(self, num_tokens: float, seconds: float, seconds_each: float) -> None:
        self.num_tokens = num_tokens
        self.seconds = seconds
        self.seconds_each = seconds_each

    def copy(self) -> _Step:
        return _Step(self.num_tokens, self.seconds, self.seconds_each)

    @property
    def least_chance(self) -> float:
        """A guess has to be likelier to pay."""
        return (1 + _MARGIN) * self.seconds_each * self.num_tokens / self.seconds

    def add(self, chance: float) -> None:
        self.num_tokens += chance
        self.seconds += self.seconds_each

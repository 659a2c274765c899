"""Adds draft tokens to the answers of a step.

Each request has one average per source of drafts: the share of its draft tokens that were accepted. Drafts run while
the average is above a cut-off. A source below the cut-off rests for REST_TOKENS tokens of that request, then tries
again. A step of more answers needs a higher average: `num_decodes / (num_decodes + ROWS_PER_STEP)`, because a row more
costs a fixed time, and a step's fixed time is shared by more tokens.

A draft from a text is as long as it pays: `AcceptanceTable` has the share of accepted tokens by the length of the match
and by the agreement of other places. The product of these shares is a token's probability. A token runs while its
probability is at least the tokens per row so far, `(num_decodes + sum of the probabilities) / (num_decodes +
ROWS_PER_STEP + num_drafts)`. A draft model proposes NUM_DRAFT_TOKENS.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tandem_engine.scheduling.admission import max_kv_tokens
from tandem_engine.scheduling.batch import Batch, ScheduledRun
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.speculation.draft_model import NUM_DRAFT_TOKENS, DraftModel
from tandem_engine.scheduling.speculation.drafters import Agreement, Draft, Drafter, EarlierAnswers, OwnText

log = logging.getLogger(__name__)

ROWS_PER_STEP = 4
"""Rows that cost as much as the fixed part of a step: a row more adds 0.15 to 0.26 of a step on an AMD EPYC (Zen 4)."""
REST_TOKENS = 32
_HIGH_RATE = 0.6
_MODEL_RATE = 0.5  # a draft model's tokens cost its own rounds, too
_FIRST_RATE, _FIRST_TOKENS = 0.5, 3.0
_FADE = 7 / 8  # of the past, with each draft
_SEARCH_TOKENS = 1.0  # a search without a draft that pays counts as so many wrong draft tokens
_REST_BELOW = 0.7  # of the rate at which a first draft token pays
_TABLE_FADE = 0.99  # of a class's past, with each token
_RELAX = 1 / 8  # of the way to its first rate, with each draft that does not pay
_FIRST_CLASS_TOKENS = 4.0  # a class begins as if so many tokens had been tried, at the rates below
_ALONE_RATES = ((0.4, 0.5, 0.6, 0.8, 0.9), (0.75, 0.8, 0.9, 0.93, 0.95))
_AGREEMENT_RATES = {Agreement.ALL: 0.97, Agreement.SOME: 0.6, Agreement.NONE: 0.3}
"""Shares measured on the built-in model's held-out questions; alone: by the request's average and the match length."""
_NUM_LENGTHS = len(_ALONE_RATES[0])


class Acceptance:
    """The share of one request's draft tokens that were accepted; recent drafts count most."""

    __slots__ = ("_num_accepted", "_num_drafted", "rests_until")

    def __init__(self) -> None:
        self._num_accepted = _FIRST_RATE * _FIRST_TOKENS
        self._num_drafted = _FIRST_TOKENS
        self.rests_until = 0
        """Number of tokens of the request from which on drafts are tried."""

    @property
    def rate(self) -> float:
        return self._num_accepted / self._num_drafted

    def observe(self, num_drafted: float, num_accepted: int, num_tokens: int, cutoff: float) -> None:
        """Count one draft of a request that has `num_tokens` tokens now."""
        self._num_accepted = _FADE * self._num_accepted + num_accepted
        self._num_drafted = _FADE * self._num_drafted + num_drafted
        if self.rate < cutoff:
            self.rests_until = num_tokens + REST_TOKENS


class AcceptanceTable:
    """The share of accepted tokens, by class of evidence, over all requests of the engine.

    A token's class is the length of its match (1, 2 to 3, 4 to 7, 8 to 15, 16 and more tokens, the tokens of the draft
    before it included), its agreement, and whether its request's own average is high.
    """

    def __init__(self) -> None:
        rates = [
            _ALONE_RATES[is_high][length] if agreement == Agreement.ALONE else _AGREEMENT_RATES[agreement]
            for is_high in (False, True)
            for length in range(_NUM_LENGTHS)
            for agreement in Agreement
        ]
        self._first_rates = rates
        self._num_accepted = [_FIRST_CLASS_TOKENS * rate for rate in rates]
        self._num_tried = [_FIRST_CLASS_TOKENS] * len(rates)

    def rate(self, of: int) -> float:
        return self._num_accepted[of] / self._num_tried[of]

    def observe(self, of: int, *, is_accepted: bool) -> None:
        self._num_accepted[of] = _TABLE_FADE * self._num_accepted[of] + is_accepted
        self._num_tried[of] = _TABLE_FADE * self._num_tried[of] + 1

    def relax(self, of: int) -> None:
        """Move a class that does not pay towards its first rate, so that it is tried again at times."""
        self._num_accepted[of] += _RELAX * (self._first_rates[of] * self._num_tried[of] - self._num_accepted[of])

    @staticmethod
    def classes(draft: Draft, *, is_high: bool) -> list[int]:
        """Return the class of each token of a draft from a text."""
        agreements = draft.agreements or [Agreement.ALONE] * len(draft.token_ids)
        lengths = [min(_NUM_LENGTHS, (draft.num_matched + at).bit_length()) - 1 for at in range(len(agreements))]
        rows = [is_high * _NUM_LENGTHS + max(0, length) for length in lengths]
        return [row * len(Agreement) + agreement for row, agreement in zip(rows, agreements, strict=True)]


class Speculator:
    """Owns the drafters and the acceptance averages."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self._of_texts: dict[Request, Acceptance] = {}
        self._of_model: dict[Request, Acceptance] = {}
        self._tried: dict[Request, tuple[Acceptance, float]] = {}  # with the cut-off of the step
        self._table = AcceptanceTable()
        self._classes: dict[Request, list[int]] = {}  # of the tokens of the step's drafts from texts
        self._model: DraftModel | None = None
        self.model_cutoff = _MODEL_RATE
        self._drafters: Sequence[Drafter] = (OwnText(), EarlierAnswers())

    def use(self, drafters: Sequence[Drafter]) -> None:
        """Replace the drafters; before the first request."""
        self._drafters = drafters

    def use_model(self, model: DraftModel) -> None:
        """Use a draft model too; before the first request."""
        self._model = model

    def draft(self, batch: Batch, num_reserve_blocks: int) -> None:
        """Put drafts behind the answers of a complete step; leave `num_reserve_blocks` blocks to other requests."""
        self._tried.clear()
        self._classes.clear()
        if not self._config.max_draft_tokens or not batch.num_tokens_left:
            return
        cutoff = _REST_BELOW * batch.num_decodes / (batch.num_decodes + ROWS_PER_STEP)
        drafts: dict[Request, tuple[Draft, Acceptance, float]] = {}
        for run in batch.runs.values():
            request, acceptance = run.request, self._of_texts.get(run.request)
            if (acceptance is None or run.end >= acceptance.rests_until) and run.is_answer:
                if acceptance is None:
                    acceptance = self._of_texts[request] = Acceptance()
                if draft := self._text_draft(request, acceptance, batch.num_decodes):
                    drafts[request] = draft, acceptance, cutoff
                else:
                    acceptance.observe(_SEARCH_TOKENS, 0, request.num_tokens, cutoff)
        if self._model is not None:
            self._ask_model(self._model, batch, num_reserve_blocks, drafts)
        for request, (draft, acceptance, its_cutoff) in drafts.items():
            if num_tokens := self._num_fitting(
                request, len(draft.token_ids), batch.num_tokens_left, num_reserve_blocks
            ):
                batch.add_drafts(request, tuple(draft.token_ids[:num_tokens]))
                self._tried[request] = acceptance, its_cutoff

    def observe(self, run: ScheduledRun, num_sampled: int) -> None:
        """Count the drafts of a run; it sampled the accepted ones and one token more."""
        if run.draft_tokens:
            acceptance, cutoff = self._tried.pop(run.request)
            acceptance.observe(len(run.draft_tokens), num_sampled - 1, run.end + num_sampled, cutoff)
            tried = min(num_sampled, len(run.draft_tokens))  # tokens behind the first wrong one tell nothing
            for position, of in enumerate(self._classes.pop(run.request, [])[:tried]):
                self._table.observe(of, is_accepted=position < num_sampled - 1)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that is over."""
        self._of_texts.pop(request, None)
        self._of_model.pop(request, None)
        self._tried.pop(request, None)
        self._classes.pop(request, None)
        if self._config.max_draft_tokens:
            for drafter in self._drafters:
                drafter.forget(request)
        if self._model is not None:
            self._model.forget(request)

    def _text_draft(self, request: Request, acceptance: Acceptance, num_decodes: int) -> Draft | None:
        """Return the draft with the longest match, cut before a stop token and where it pays no more."""
        max_tokens = self._max_tokens(request)
        if max_tokens < 1:
            return None
        best: Draft | None = None
        for drafter in self._drafters:
            draft = drafter.draft(request, max_tokens)
            if draft is not None and (best is None or draft.num_matched > best.num_matched):
                best = draft
        draft = None if best is None else _before_stop(best, request)
        return None if draft is None else self._as_long_as_it_pays(draft, request, acceptance, num_decodes)

    def _as_long_as_it_pays(
        self, draft: Draft, request: Request, acceptance: Acceptance, num_decodes: int
    ) -> Draft | None:
        """Return the tokens of a draft that pay for their rows; None for none."""
        classes = self._table.classes(draft, is_high=acceptance.rate >= _HIGH_RATE)
        self._classes[request] = classes
        num_tokens, probability, num_expected = 0, 1.0, float(num_decodes)
        for of in classes:
            probability *= self._table.rate(of)
            if probability * (num_decodes + ROWS_PER_STEP + num_tokens) < num_expected:
                break
            num_expected += probability
            num_tokens += 1
        if not num_tokens:
            self._table.relax(classes[0])
            return None
        return draft.cut(num_tokens)

    def _ask_model(
        self,
        model: DraftModel,
        batch: Batch,
        num_reserve_blocks: int,
        drafts: dict[Request, tuple[Draft, Acceptance, float]],
    ) -> None:
        """Replace drafts by the model's where its average is higher. A model that raises is switched off."""
        num_room = batch.num_tokens_left - sum(len(draft.token_ids) for draft, *_ in drafts.values())
        wanted: dict[Request, int] = {}
        for run in batch.runs.values():
            request = run.request
            if run.is_answer and self._is_for_model(request, drafts.get(request)):
                num_tokens = min(NUM_DRAFT_TOKENS, self._max_tokens(request))
                num_tokens = self._num_fitting(request, num_tokens, num_room, num_reserve_blocks)
                if num_tokens and model.num_missing(request) is not None:
                    wanted[request] = num_tokens
                    num_room -= num_tokens
        if not wanted:
            return
        try:
            proposed: Mapping[Request, Sequence[int]] = model.propose(wanted)
        except Exception as error:  # noqa: BLE001 - no request needs a draft, whatever the error is
            log.error("the draft model is switched off: %s: %s", type(error).__name__, error)
            self._model = None
            return
        for request, token_ids in proposed.items():
            if draft := _before_stop(Draft(token_ids, 0), request):
                drafts[request] = draft, self._of_model[request], self.model_cutoff
                self._classes.pop(request, None)

    def _is_for_model(self, request: Request, text: tuple[Draft, Acceptance, float] | None) -> bool:
        acceptance = self._of_model.setdefault(request, Acceptance())
        if request.num_tokens < acceptance.rests_until:
            return False
        return text is None or text[1].rate < acceptance.rate

    def _max_tokens(self, request: Request) -> int:
        """Return how many drafts a step may have and the answer still has room for."""
        return min(self._config.max_draft_tokens, max_kv_tokens(request, self._config) - request.num_tokens)

    def _num_fitting(self, request: Request, num_tokens: int, num_room: int, num_reserve_blocks: int) -> int:
        """Return how many drafts fit the budget and have slots; takes new blocks for them."""
        num_tokens = min(num_tokens, num_room)
        return self._kv.room_for_drafts(request, num_tokens, num_reserve_blocks) if num_tokens > 0 else 0


def _before_stop(draft: Draft, request: Request) -> Draft | None:
    """Cut a draft before a stop token: nothing follows it."""
    for stop in request.sampling.stop_token_ids:
        if stop in draft.token_ids:
            draft = draft.cut(draft.token_ids.index(stop))
    return draft if draft.token_ids else None

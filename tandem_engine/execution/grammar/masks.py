"""Computes the allowed tokens of the constrained requests in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tandem_engine.core import RequestsFailed
from tandem_engine.execution.grammar.compiled import CompiledGrammars
from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed, Matcher
from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.batch import ScheduledRun
from tandem_engine.scheduling.request import Request


@dataclass
class _Place:
    """The position of one request's matcher."""

    matcher: Matcher
    num_tokens: int
    """Tokens of the request that the matcher has consumed; the prompt counts as consumed."""


class GrammarMasks:
    """Owns one matcher per request, as long as the request exists.

    A matcher is never transferred: another worker, or this one after a preemption, builds a new one from the answer.
    """

    def __init__(self, guide: Callable[[], Compile]) -> None:
        """`guide` is called at the first grammar; it raises GrammarFailed if grammars are not possible."""
        self._compiled = CompiledGrammars(guide)
        self._places: WeakKeyDictionary[Request, _Place] = WeakKeyDictionary()
        self._pending: list[tuple[str, Matcher]] = []

    def prepare(self, request: Request) -> bool:
        """Start to compile a request's grammar; return whether `begin` would not wait for it."""
        grammar = request.sampling.grammar
        return grammar is None or request.num_generated_tokens > 0 or self._compiled.is_ready(grammar)

    def begin(self, runs: Sequence[ScheduledRun]) -> None:
        """Start to compute the masks of runs that sample; earlier unfinished masks are dropped.

        Raises RequestsFailed for the first request that has no matcher.
        """
        if self._pending:  # that step failed: the matchers' positions are unknown
            self._finish()
            self._places.clear()
            self._pending = []
        for run in runs:
            if run.samples and run.request.sampling.grammar is not None:
                self._request(run)
        if self._pending and (builder := self._pending[0][1].builder):
            builder.begin([matcher for _, matcher in self._pending])

    def take(self) -> Mapping[str, Sequence[Words]]:
        """Return the masks of `begin` by request id: one, and one behind each allowed draft.

        Raises RequestsFailed for all requests whose grammars have no continuation.
        """
        if not self._pending:
            return {}
        self._finish()
        masks: dict[str, Sequence[Words]] = {}
        failures: dict[str, GrammarFailed] = {}
        for request_id, matcher in self._pending:
            try:
                masks[request_id] = matcher.masks()
            except GrammarFailed as error:  # the other matchers still have to consume their tokens
                failures[request_id] = error
        self._pending = []
        if failures:
            raise _failure(failures)
        return masks

    def _finish(self) -> None:
        if builder := self._pending[0][1].builder:
            builder.finish()

    def _request(self, run: ScheduledRun) -> None:
        request = run.request
        try:
            place = self._place(request)
        except GrammarFailed as error:
            raise _failure({request.request_id: error}) from error
        first, place.num_tokens = place.num_tokens, request.num_tokens
        place.matcher.request_masks(request.token_ids[first:], run.draft_tokens)
        self._pending.append((request.request_id, place.matcher))

    def _place(self, request: Request) -> _Place:
        place = self._places.get(request)
        if place is None:
            assert request.sampling.grammar is not None, "only constrained requests have a matcher"
            matcher = self._compiled.matcher(request.sampling.grammar)
            place = self._places[request] = _Place(matcher, request.num_prompt_tokens)
        return place


def _failure(errors: Mapping[str, GrammarFailed]) -> RequestsFailed:
    messages = {request_id: str(error) for request_id, error in errors.items()}
    first = next(iter(errors.values()))
    failure = RequestsFailed(list(errors), str(first), is_callers_fault=True, messages=messages)
    failure.__cause__ = first
    return failure

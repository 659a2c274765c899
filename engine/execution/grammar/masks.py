"""Which tokens may each constrained request of a step be given?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.core import RequestsFailed
from engine.execution.grammar.compiled import CompiledGrammars
from engine.execution.grammar.matcher import Compile, GrammarFailed, Matcher
from engine.ops.sampling import Words
from engine.scheduling.batch import ScheduledRun
from engine.scheduling.request import Request


@dataclass
class _Place:
    """Where one request's matcher stands."""

    matcher: Matcher
    num_tokens: int
    """Of the request, that it has taken in, or need not: the prompt."""


class GrammarMasks:
    """A matcher per request, for as long as somebody knows the request.

    None is ever handed on: another worker, and this one after a preemption, makes its own from the answer's tokens.
    """

    def __init__(self, guide: Callable[[], Compile]) -> None:
        """`guide` is called at the first grammar; raises GrammarFailed where there can be none."""
        self._compiled = CompiledGrammars(guide)
        self._places: WeakKeyDictionary[Request, _Place] = WeakKeyDictionary()

    def prepare(self, request: Request) -> bool:
        """Begin to compile a request's grammar, and return whether `of` would not wait for it."""
        grammar = request.sampling.grammar
        return grammar is None or request.num_generated_tokens > 0 or self._compiled.is_ready(grammar)

    def of(self, runs: Sequence[ScheduledRun]) -> Mapping[str, Sequence[Words]]:
        """Return, by request id, the masks of runs that sample: one, and one behind each draft that is allowed.

        Raises RequestsFailed for the first request whose grammar has no way on.
        """
        return {
            run.request.request_id: self._masks(run)
            for run in runs
            if run.samples and run.request.sampling.grammar is not None
        }

    def _masks(self, run: ScheduledRun) -> Sequence[Words]:
        request = run.request
        try:
            place = self._place(request)
            first, place.num_tokens = place.num_tokens, request.num_tokens
            return place.matcher.masks(request.token_ids[first:], run.draft_tokens)
        except GrammarFailed as error:
            raise RequestsFailed([request.request_id], str(error), is_callers_fault=True) from error

    def _place(self, request: Request) -> _Place:
        place = self._places.get(request)
        if place is None:
            assert request.sampling.grammar is not None, "only constrained requests have a matcher"
            matcher = self._compiled.matcher(request.sampling.grammar)
            place = self._places[request] = _Place(matcher, request.num_prompt_tokens)
        return place

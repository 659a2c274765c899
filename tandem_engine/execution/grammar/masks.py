"""Which tokens may each constrained request of a step be given?"""

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
        self._asked: list[tuple[str, Matcher]] = []

    def prepare(self, request: Request) -> bool:
        """Begin to compile a request's grammar, and return whether `begin` would not wait for it."""
        grammar = request.sampling.grammar
        return grammar is None or request.num_generated_tokens > 0 or self._compiled.is_ready(grammar)

    def begin(self, runs: Sequence[ScheduledRun]) -> None:
        """Begin to make the masks of runs that sample; what was begun before is dropped.

        Raises RequestsFailed for the first request that has no matcher.
        """
        if self._asked:  # that step broke, and which tokens were taken in nobody knows
            self._finish()
            self._places.clear()
            self._asked = []
        for run in runs:
            if run.samples and run.request.sampling.grammar is not None:
                self._ask(run)
        if self._asked and (crew := self._asked[0][1].crew):
            crew.begin([matcher for _, matcher in self._asked])

    def take(self) -> Mapping[str, Sequence[Words]]:
        """Return the masks that were begun by request id: one, and one behind each draft that is allowed.

        Raises RequestsFailed for the first request whose grammar has no way on.
        """
        if not self._asked:
            return {}
        self._finish()
        masks: dict[str, Sequence[Words]] = {}
        failure: RequestsFailed | None = None
        for request_id, matcher in self._asked:
            try:
                masks[request_id] = matcher.masks()
            except GrammarFailed as error:  # the others have taken their tokens in, or do so now
                failure = failure or _failure(request_id, error)
        self._asked = []
        if failure is not None:
            raise failure
        return masks

    def _finish(self) -> None:
        if crew := self._asked[0][1].crew:
            crew.finish()

    def _ask(self, run: ScheduledRun) -> None:
        request = run.request
        try:
            place = self._place(request)
        except GrammarFailed as error:
            raise _failure(request.request_id, error) from error
        first, place.num_tokens = place.num_tokens, request.num_tokens
        place.matcher.ask(request.token_ids[first:], run.draft_tokens)
        self._asked.append((request.request_id, place.matcher))

    def _place(self, request: Request) -> _Place:
        place = self._places.get(request)
        if place is None:
            assert request.sampling.grammar is not None, "only constrained requests have a matcher"
            matcher = self._compiled.matcher(request.sampling.grammar)
            place = self._places[request] = _Place(matcher, request.num_prompt_tokens)
        return place


def _failure(request_id: str, error: GrammarFailed) -> RequestsFailed:
    failure = RequestsFailed([request_id], str(error), is_callers_fault=True)
    failure.__cause__ = error
    return failure

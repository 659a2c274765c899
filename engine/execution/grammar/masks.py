"""Which tokens may each constrained request of a step be given?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

from engine.core import RequestsFailed
from engine.execution.grammar.matcher import GrammarFailed, MakeMatcher, Matcher
from engine.ops.sampling import Words
from engine.scheduling.batch import ScheduledRun
from engine.scheduling.request import Request


class GrammarMasks:
    """A matcher per request, for as long as somebody knows the request.

    None is ever handed on: another worker, and this one after a preemption, makes its own from the answer's tokens.
    """

    def __init__(self, guide: Callable[[], MakeMatcher]) -> None:
        """`guide` is called at the first grammar; raises GrammarFailed where there can be none."""
        self._guide = guide
        self._make: MakeMatcher | None = None
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()

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
            answer = request.token_ids[request.num_prompt_tokens :]
            return self._matcher(request).masks(answer, run.draft_tokens)
        except GrammarFailed as error:
            raise RequestsFailed([request.request_id], str(error), is_callers_fault=True) from error

    def _matcher(self, request: Request) -> Matcher:
        matcher = self._matchers.get(request)
        if matcher is None:
            assert request.sampling.grammar is not None, "only constrained requests have a matcher"
            self._make = self._make or self._guide()
            matcher = self._matchers[request] = self._make(request.sampling.grammar)
        return matcher


def no_guide() -> MakeMatcher:
    """Stand in where nothing reads grammars."""
    raise GrammarFailed("this runner was made without anything that reads grammars")

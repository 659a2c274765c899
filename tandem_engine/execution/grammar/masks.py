"""Computes the allowed tokens of the constrained requests in a step: by grammars, and by limits of their thinking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tandem_engine.core import RequestsFailed
from tandem_engine.execution.grammar.compiled import CompiledGrammars
from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed, Matcher
from tandem_engine.execution.grammar.thought import Thought, with_token
from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.batch import ScheduledRun
from tandem_engine.scheduling.request import Request


@dataclass
class _Place:
    """The position of one request in its thinking and its grammar."""

    matcher: Matcher | None
    """None: only the thinking is limited."""
    num_tokens: int
    """Tokens of the request that were followed; the prompt counts as followed."""
    thought: Thought | None = None
    """None once the thinking is over, and where there is none."""


class _Pending(NamedTuple):
    """The masks of one request: what `rows` makes of those of `matcher`."""

    request_id: str
    matcher: Matcher | None
    rows: Callable[[Sequence[Words]], Sequence[Words | None]]


class GrammarMasks:
    """Owns one matcher per request, as long as the request exists.

    A matcher is never transferred: another worker, or this one after a preemption, builds a new one from the answer.
    """

    def __init__(self, guide: Callable[[], Compile]) -> None:
        """`guide` is called at the first grammar; it raises GrammarFailed if grammars are not possible."""
        self._compiled = CompiledGrammars(guide)
        self._places: WeakKeyDictionary[Request, _Place] = WeakKeyDictionary()
        self._pending: list[_Pending] = []

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
            if run.samples and _is_constrained(run.request):
                self._request(run)
        matchers = [each.matcher for each in self._pending if each.matcher is not None]
        if matchers and (builder := matchers[0].builder):
            builder.begin(matchers)

    def take(self) -> Mapping[str, Sequence[Words | None]]:
        """Return the masks of `begin` by request id: one, and one behind each allowed draft. None: all are allowed.

        Raises RequestsFailed for all requests whose grammars have no continuation.
        """
        if not self._pending:
            return {}
        self._finish()
        masks: dict[str, Sequence[Words | None]] = {}
        failures: dict[str, GrammarFailed] = {}
        for request_id, matcher, rows in self._pending:
            try:
                masks[request_id] = rows(matcher.masks() if matcher is not None else ())
            except GrammarFailed as error:  # the other matchers still have to consume their tokens
                failures[request_id] = error
        self._pending = []
        if failures:
            raise _failure(failures)
        return masks

    def _finish(self) -> None:
        builder = next((each.matcher.builder for each in self._pending if each.matcher is not None), None)
        if builder is not None:
            builder.finish()

    def _request(self, run: ScheduledRun) -> None:
        request = run.request
        try:
            place = self._place(request)
        except GrammarFailed as error:
            raise _failure({request.request_id: error}) from error
        if place.thought is not None:
            place.thought.follow(request.token_ids[place.num_tokens :])
            place.num_tokens = request.num_prompt_tokens + place.thought.num_tokens
            if not place.thought.is_over:
                self._pending.append(_while_thinking(request, place.thought, place.matcher, run.draft_tokens))
                return
            place.thought = None
        if place.matcher is None:
            return
        first, place.num_tokens = place.num_tokens, request.num_tokens
        place.matcher.request_masks(request.token_ids[first:], run.draft_tokens)
        self._pending.append(_Pending(request.request_id, place.matcher, lambda masks: masks))

    def _place(self, request: Request) -> _Place:
        place = self._places.get(request)
        if place is None:
            sampling = request.sampling
            matcher = None if sampling.grammar is None else self._compiled.matcher(sampling.grammar)
            thought = None if sampling.thinking is None else Thought(sampling.thinking)
            place = self._places[request] = _Place(matcher, request.num_prompt_tokens, thought)
        return place


def _is_constrained(request: Request) -> bool:
    thinking = request.sampling.thinking
    return request.sampling.grammar is not None or (thinking is not None and thinking.max_tokens is not None)


def _while_thinking(
    request: Request, thought: Thought, matcher: Matcher | None, draft_tokens: Sequence[int]
) -> _Pending:
    """Return the masks of an answer that still thinks: the grammar begins behind the drafts that end the thinking."""
    rows, num_drafts = thought.rows(draft_tokens)
    start = None if request.sampling.thinking is None else request.sampling.thinking.start_token_id
    if matcher is None:
        return _Pending(request.request_id, None, lambda _: rows)
    if thought.is_undecided and start is not None:  # the answer begins with the start of its thinking, or at once
        thinks = bool(draft_tokens) and draft_tokens[0] == start
        behind = draft_tokens[num_drafts:] if num_drafts is not None else ()
        matcher.request_masks([], behind if thinks else draft_tokens)

        def first(masks: Sequence[Words]) -> Sequence[Words | None]:
            either = with_token(masks[0], start)
            if not thinks:
                return [either, *masks[1:]]
            return [either, *rows[1:], *(masks if num_drafts is not None else ())]

        return _Pending(request.request_id, matcher, first)
    if num_drafts is None:
        return _Pending(request.request_id, None, lambda _: rows)
    matcher.request_masks([], draft_tokens[num_drafts:])
    return _Pending(request.request_id, matcher, lambda masks: [*rows, *masks])


def _failure(errors: Mapping[str, GrammarFailed]) -> RequestsFailed:
    messages = {request_id: str(error) for request_id, error in errors.items()}
    first = next(iter(errors.values()))
    failure = RequestsFailed(list(errors), str(first), is_callers_fault=True, messages=messages)
    failure.__cause__ = first
    return failure

"""Runs a text request: tokenize, admit, submit, detokenize, stop.

Endpoints make a `CompletionRequest` or a `ChatRequest`, and `TextService.start` returns its running `TextStream`.
"""

from __future__ import annotations

import asyncio
import math
import operator
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from types import TracebackType
from typing import Any

import anyio

from control_plane.accounts.ledger import Status
from control_plane.accounts.metering import BilledRequest, LedgerEntry, Meter, Unmetered
from control_plane.generation import (
    Dispatcher,
    ModelCatalog,
    ModelDescription,
    PositionLogprobs,
    TokenDelta,
    TokenRequest,
    TokenStream,
    Usage,
)
from control_plane.text.choice import ChoiceText, TextDelta, TextLogprobs
from control_plane.text.prompt_logprobs import prompt_logprobs
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.request import ChatRequest, CompletionRequest, prompt_ids, stop_token_ids, token_request
from control_plane.text.structure import GrammarCheck
from control_plane.text.telemetry import GenerationMeter, GenerationRecord
from control_plane.text.tokenizer import TextTokenizer, TokenizerCache
from control_plane.text.tools.parser import CallParser
from control_plane.text.tools.planning import ToolPlan, call_id, plan_tools
from tandem_runtime import tracing
from tandem_runtime.errors import Cancelled, DeadlineExceeded, InternalError

DEFAULT_TIMEOUT_SECONDS = 600.0
FALLBACK_HEADER = "tandem-fallback-model"
"""Response header with the model that answered in place of the requested one."""


class TextService:
    """Answers text requests with text. Uses no HTTP, and reaches workers only through the dispatcher."""

    def __init__(
        self,
        catalog: ModelCatalog,
        dispatcher: Dispatcher,
        *,
        default_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        public_prefixes: PublicPrefixes | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._default_timeout_seconds = default_timeout_seconds
        self._tokenizers = TokenizerCache()
        self._grammars = GrammarCheck()
        self._public_prefixes = public_prefixes
        self._meter = GenerationMeter()
        self._accounts: Meter = meter or Unmetered()

    async def start(self, request: CompletionRequest | ChatRequest) -> TextStream:
        """Return the stream as soon as a worker has accepted the request. Raise TandemError if none does.

        The caller owns the stream and closes it. If this is cancelled, the request is cancelled, too.
        """
        return await self.start_prepared(await self.prepare(request))

    async def prepare(self, request: CompletionRequest | ChatRequest) -> Prompt:
        """Tokenize a request and start its deadline, without admission. Raise TandemError."""
        requested = request.caller.timeout_seconds
        timeout_seconds = min(self._default_timeout_seconds, math.inf if requested is None else requested)
        deadline = time.time() + timeout_seconds
        record = GenerationRecord(self._meter, request)
        with _recorded(record):
            async with _until(deadline, timeout_seconds):
                model = await self._catalog.get(request.model)
                record.model_found(model)
                if model.is_fallback:
                    request.caller.answer_headers[FALLBACK_HEADER] = model.model_id
                if request.options.grammar is not None:
                    await self._grammars.check(request.options.grammar, request.options.grammar_field)
                tokenizer = await self._tokenizers.get(model)
                tool_plan = None
                if isinstance(request, ChatRequest) and request.uses_tools:
                    request, tool_plan = await plan_tools(request, model, tokenizer, self._grammars)
                with tracing.tracer().start_as_current_span("tokenize"):
                    token_ids = await prompt_ids(request, model, tokenizer)
                    num_public_tokens = 0
                    if self._public_prefixes is not None:
                        num_public_tokens = await self._public_prefixes.num_tokens(model, tokenizer, token_ids)
            for_dispatcher = token_request(request, model, token_ids, deadline, num_public_tokens)
        return Prompt(request, model, tokenizer, for_dispatcher, timeout_seconds, record, tool_plan)

    async def start_prepared(self, prompt: Prompt) -> TextStream:
        """Admit and submit a prepared prompt. Raise TandemError."""
        with _recorded(prompt.record):
            async with _until(prompt.token_request.deadline, prompt.timeout_seconds):
                entry = await self._accounts.admit(
                    prompt.request.caller, BilledRequest.for_answer(prompt.token_request)
                )
                tokens = await self._submit(prompt.token_request, entry)
        return TextStream(tokens, prompt, entry)

    async def _submit(self, request: TokenRequest, entry: LedgerEntry) -> TokenStream:
        """Submit an admitted request, and wait until its ledger row is written."""
        tokens = None
        try:
            tokens = await self._dispatcher.submit(request)
            await entry.opened()
        except BaseException as error:
            if tokens is not None:
                with anyio.CancelScope(shield=True):
                    await tokens.aclose()
            entry.close(*_outcome(error))
            raise
        return tokens

    async def prompt_logprobs(self, prompt: Prompt, num_logprobs: int) -> tuple[tuple[TextLogprobs, ...], Usage]:
        """Return the log probabilities of every token of a prompt but the first, and their usage. Raise TandemError.

        Scoring is admitted and has a ledger row like a request of its own.
        """
        if len(prompt.token_ids) == 1:
            return (), Usage(0, 0, 0, 0)
        with _recorded(prompt.record):
            async with _until(prompt.token_request.deadline, prompt.timeout_seconds):
                entry = await self._accounts.admit(
                    prompt.request.caller, BilledRequest.for_prompt_scores(prompt.token_request)
                )
                found, used = await self._score(prompt.token_request, num_logprobs, entry)
        text = ChoiceText(prompt.tokenizer)
        text.push(TokenDelta(0, prompt.token_ids[:1]))
        return text.push(TokenDelta(0, prompt.token_ids[1:], tuple(found), "length")).logprobs, entry.priced(used)

    async def _score(
        self, request: TokenRequest, num_logprobs: int, entry: LedgerEntry
    ) -> tuple[Sequence[PositionLogprobs], Usage]:
        """Score an admitted prompt. Return the log probabilities and the total usage."""
        used: list[Usage] = []
        try:
            await entry.opened()
            found = await prompt_logprobs(self._dispatcher, request, num_logprobs, used)
        except BaseException as error:
            status, _, reasons, name = _outcome(error)
            entry.close(status, _sum(used) if used else None, reasons, name)
            raise
        entry.close("finished", _sum(used))
        return found, _sum(used)


@dataclass(frozen=True)
class Prompt:
    """A tokenized request, with its model, tokenizer, deadline and record."""

    request: CompletionRequest | ChatRequest
    model: ModelDescription
    tokenizer: TextTokenizer
    token_request: TokenRequest
    timeout_seconds: float
    record: GenerationRecord
    tool_plan: ToolPlan | None = None
    """How tool calls are read from the answer; None if the answer is only text."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.token_request.token_ids

    @property
    def text(self) -> str:
        """The prompt as text."""
        if isinstance(self.request, CompletionRequest) and isinstance(self.request.prompt, str):
            return self.request.prompt
        return self.tokenizer.decode(self.token_ids)


class TextStream:
    """The answer to one request, all choices, as text. Iterate once; close at any time."""

    def __init__(self, tokens: TokenStream, prompt: Prompt, entry: LedgerEntry) -> None:
        self.prompt = prompt
        self._tokens = tokens
        self._record = prompt.record
        self._entry = entry
        self._has_tokens = False
        self._choices = [_new_choice(prompt, index) for index in range(prompt.request.options.num_choices)]

    @property
    def model(self) -> ModelDescription:
        return self.prompt.model

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Final once iteration has ended."""
        return self._entry.priced(self._tokens.usage)

    @property
    def route(self) -> Mapping[str, Any]:
        return self._tokens.route

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yield text as it arrives. Every choice ends with a finish reason, or this raises TandemError."""
        async for batch in self.batches():
            for text in batch:
                yield text

    async def batches(self) -> AsyncIterator[Iterator[TextDelta]]:
        """Yield the same deltas in batches of all that has arrived. Read a batch to its end before the next."""
        try:
            async for batch in self._token_batches():
                yield self._texts(batch)
            reasons = self._finish_reasons()
            self._record.finished(self.usage, reasons)
            self._entry.close("finished", self.usage, " ".join(dict.fromkeys(reasons)))
        except BaseException as error:
            self._record.failed(error)
            self._close_entry(error)
            raise
        finally:
            await self.aclose()

    def _texts(self, batch: Iterator[TokenDelta]) -> Iterator[TextDelta]:
        try:
            for delta in batch:
                text = self._push(delta)
                if text is not None:
                    self._record.text_arrived()
                    yield text
        except Exception as error:
            self._record.failed(error)
            self._close_entry(error)
            raise

    def _finish_reasons(self) -> list[str]:
        reasons: list[str] = [choice.finish_reason for choice in self._choices if choice.finish_reason is not None]
        if len(reasons) < len(self._choices):
            raise InternalError("the stream of tokens ended before the answer did; try again")
        return reasons

    async def aclose(self) -> None:
        """Cancel what still runs. This completes even while the surrounding task is being cancelled."""
        self._close_entry(None)
        with anyio.CancelScope(shield=True):
            await self._tokens.aclose()

    def _close_entry(self, error: BaseException | None) -> None:
        """Close the ledger entry of an incomplete answer: failed if there is an error, else cancelled."""
        status, _, reasons, name = _outcome(error)
        # Before the first token, the computed part of the prompt is unknown, so nothing is counted.
        self._entry.close(status, self._tokens.usage if self._has_tokens else None, reasons, name)

    async def _token_batches(self) -> AsyncIterator[Iterator[TokenDelta]]:
        iterator = aiter(self._tokens.batches())
        deadline = Deadline(self.prompt.token_request.deadline, self.prompt.timeout_seconds)
        try:
            while True:
                async with deadline:
                    batch = await anext(iterator, None)
                if batch is None:
                    return
                self._has_tokens = True
                yield batch
        finally:
            deadline.close()

    def _push(self, delta: TokenDelta) -> TextDelta | None:
        choice = self._choices[delta.choice_index]
        if choice.finish_reason is not None:  # tokens that were in flight when a stop string ended the choice
            return None
        text = choice.push(delta)
        if choice.ended_by_stop_string and delta.finish_reason is None:
            self._tokens.stop_choice(delta.choice_index)
        return text if text.text or text.calls or text.logprobs or text.finish_reason else None


def _outcome(error: BaseException | None) -> tuple[Status, None, str, str]:
    """Return status, usage, finish reasons and error of an incomplete request, as `LedgerEntry.close` takes them."""
    if isinstance(error, Exception) and not isinstance(error, Cancelled):
        return "failed", None, "", type(error).__name__
    return "cancelled", None, "", ""


def _new_choice(prompt: Prompt, index: int) -> ChoiceText:
    """Return the text of a new choice. A completion continues its prompt's text; a chat answer does not."""
    calls, plan = None, prompt.tool_plan
    if plan is not None:
        calls = CallParser(plan.form, partial(call_id, prompt.token_request.request_id, index))
    return ChoiceText(
        prompt.tokenizer,
        context_ids=() if isinstance(prompt.request, ChatRequest) else prompt.token_ids,
        stop_strings=prompt.request.options.stop,
        stop_token_ids=stop_token_ids(prompt.request.options, prompt.model),
        calls=calls,
        shown_ids=() if plan is None else tuple(plan.control_ids.values()),
    )


def _sum(used: Sequence[Usage]) -> Usage:
    return reduce(operator.add, used, Usage(0, 0, 0, 0))


@contextmanager
def _recorded(record: GenerationRecord) -> Iterator[None]:
    """Record a failure of the generation inside the block."""
    try:
        yield
    except BaseException as error:
        record.failed(error)
        raise


@asynccontextmanager
async def _until(deadline: float, timeout_seconds: float) -> AsyncIterator[None]:
    """Raise DeadlineExceeded if `deadline` (Unix seconds) passes inside the block."""
    time_left = Deadline(deadline, timeout_seconds)
    try:
        async with time_left:
            yield
    finally:
        time_left.close()


class Deadline:
    """`async with deadline:` cancels the awaits inside when the deadline passes, and raises DeadlineExceeded.

    Unlike asyncio.timeout, it can be entered for every wait of a stream, and one timer serves all waits. One task may
    use it at a time. Call `close` after the last wait.
    """

    def __init__(self, at: float, timeout_seconds: float) -> None:
        """`at`: Unix seconds. `timeout_seconds` is only for the error message."""
        self._timeout_seconds = timeout_seconds
        self._has_passed = False
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + at - time.time()
        self._timer = self._loop.call_at(self._at, self._pass)

    def close(self) -> None:
        self._timer.cancel()

    async def __aenter__(self) -> None:
        if self._has_passed or self._loop.time() >= self._at:  # a timer may fire early, by the clock's resolution
            raise self._error()
        self._task = asyncio.current_task()
        assert self._task is not None, "a deadline is entered inside a task"
        self._num_cancels = self._task.cancelling()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._has_passed or task is None:
            return
        # Undo our own cancel; a cancel by others at the same time stays.
        if task.uncancel() <= self._num_cancels and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error() from error

    def _pass(self) -> None:
        self._has_passed = True
        if self._task is not None:
            self._task.cancel()

    def _error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the request took longer than its {self._timeout_seconds:g} seconds; request fewer tokens or more time"
        )

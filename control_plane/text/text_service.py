"""What happens between a validated request and its text: tokenize, submit, detokenize, stop?

Every face makes a `CompletionRequest` or a `ChatRequest`; `TextService.start` turns it into a running `TextStream`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import anyio

from control_plane.accounts.ledger import Status
from control_plane.accounts.metering import Asked, Entry, Meter, Unmetered
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
from control_plane.text.deadline import Deadline
from control_plane.text.prompt_ids import prompt_ids
from control_plane.text.prompt_logprobs import prompt_logprobs
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.request import (
    ChatRequest,
    CompletionRequest,
    stop_token_ids,
    token_request,
)
from control_plane.text.structure import GrammarCheck
from control_plane.text.telemetry import GenerationMeter, GenerationRecord
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tokenizer_cache import TokenizerCache
from control_plane.text.tools.parser import CallParser
from control_plane.text.tools.planning import ToolPlan, call_id, planned
from tandem_runtime import tracing
from tandem_runtime.errors import Cancelled, InternalError

DEFAULT_TIMEOUT_SECONDS = 600.0
FALLBACK_HEADER = "tandem-fallback-model"
"""Names the model that answered in the place of the one that was asked for."""


class TextService:
    """Text in, text out; knows no HTTP and no worker."""

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
        self._public_prefixes = public_prefixes or PublicPrefixes({})
        self._meter = GenerationMeter()
        self._accounts: Meter = meter or Unmetered()

    async def start(self, request: CompletionRequest | ChatRequest) -> TextStream:
        """Return the stream once a worker has accepted the request; raises TandemError if none will.

        The caller owns the stream and closes it. Nothing runs on if this is cancelled.
        """
        return await self.start_prepared(await self.prepare(request))

    async def prepare(self, request: CompletionRequest | ChatRequest) -> Prompt:
        """Tokenize a request, whose time runs from now on; raises TandemError. Nothing has been admitted yet."""
        asked_seconds, most_seconds = request.caller.timeout_seconds, self._default_timeout_seconds
        timeout_seconds = most_seconds if asked_seconds is None else min(asked_seconds, most_seconds)
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
                if isinstance(request, ChatRequest):
                    request, tool_plan = await planned(request, model, tokenizer, self._grammars)
                with tracing.tracer().start_as_current_span("tokenize"):
                    token_ids = await prompt_ids(request, model, tokenizer)
                    num_public_tokens = await self._public_prefixes.num_tokens(model, tokenizer, token_ids)
            token_only = token_request(request, model, token_ids, deadline, num_public_tokens)
        return Prompt(request, model, tokenizer, token_only, timeout_seconds, record, tool_plan)

    async def start_prepared(self, prompt: Prompt) -> TextStream:
        """Do the rest of `start`."""
        with _recorded(prompt.record):
            async with _until(prompt.token_request.deadline, prompt.timeout_seconds):
                entry = await self._accounts.admit(prompt.request.caller, Asked.answer(prompt.token_request))
                tokens = await self._submit(prompt.token_request, entry)
        return TextStream(tokens, prompt, entry)

    async def _submit(self, request: TokenRequest, entry: Entry) -> TokenStream:
        """Start a request that was admitted; it runs only if it is in the ledger."""
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
        """Return those of every token of a prompt but the first, and what they cost; raises TandemError.

        They are admitted and written down as a request of their own.
        """
        if len(prompt.token_ids) == 1:
            return (), Usage(0, 0, 0, 0)
        with _recorded(prompt.record):
            async with _until(prompt.token_request.deadline, prompt.timeout_seconds):
                entry = await self._accounts.admit(prompt.request.caller, Asked.scores(prompt.token_request))
                found, used = await self._score(prompt.token_request, num_logprobs, entry)
        text = ChoiceText(prompt.tokenizer)
        text.push(TokenDelta(0, prompt.token_ids[:1]))
        return text.push(TokenDelta(0, prompt.token_ids[1:], tuple(found), "length")).logprobs, entry.priced(used)

    async def _score(
        self, request: TokenRequest, num_logprobs: int, entry: Entry
    ) -> tuple[Sequence[PositionLogprobs], Usage]:
        """Score a prompt that was admitted; returns also the sum of what was used."""
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
    """A request with what was found out about it on the way to the workers."""

    request: CompletionRequest | ChatRequest
    model: ModelDescription
    tokenizer: TextTokenizer
    token_request: TokenRequest
    timeout_seconds: float
    record: GenerationRecord
    tool_plan: ToolPlan | None = None
    """How calls are read in the answer; None: the answer is text."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.token_request.token_ids

    @property
    def text(self) -> str:
        """What a completion continues, as text."""
        if isinstance(self.request, CompletionRequest) and isinstance(self.request.prompt, str):
            return self.request.prompt
        return self.tokenizer.decode(self.token_ids)


class TextStream:
    """The answer to one request, all choices, as text; to be iterated once and closed at any time."""

    def __init__(self, tokens: TokenStream, prompt: Prompt, entry: Entry) -> None:
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
        """Yield text as it comes; every choice ends with a finish reason, or this raises TandemError."""
        async for batch in self.batches():
            for text in batch:
                yield text

    async def batches(self) -> AsyncIterator[Iterator[TextDelta]]:
        """Yield the same, all that has come at a time; a batch is read to its end before the next is asked for."""
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
                    self._record.text_came()
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
        """Cancel what still runs; completes even while the surrounding task is being cancelled."""
        self._close_entry(None)
        with anyio.CancelScope(shield=True):
            await self._tokens.aclose()

    def _close_entry(self, error: BaseException | None) -> None:
        """Say that the answer ended before it was complete: because of an error, or because nobody wants the rest."""
        status, _, reasons, name = _outcome(error)
        # Until the first token nobody knows how much of the prompt was read: then none of it is counted.
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
        if choice.finish_reason is not None:  # tokens that were on their way when a stop string ended the choice
            return None
        text = choice.push(delta)
        if choice.ended_by_stop_string and delta.finish_reason is None:
            self._tokens.stop_choice(delta.choice_index)
        return text if text.text or text.calls or text.logprobs or text.finish_reason else None


def _outcome(error: BaseException | None) -> tuple[Status, None, str, str]:
    """Return status, usage, finish reasons and error of a request that did not come to its end."""
    if isinstance(error, Exception) and not isinstance(error, Cancelled):
        return "failed", None, "", type(error).__name__
    return "cancelled", None, "", ""


def _new_choice(prompt: Prompt, index: int) -> ChoiceText:
    """A completion's text goes on where its prompt ends; an answer in a chat begins anew."""
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
    """Note in a record that its generation fails inside the block."""
    try:
        yield
    except BaseException as error:
        record.failed(error)
        raise


@asynccontextmanager
async def _until(deadline: float, timeout_seconds: float) -> AsyncIterator[None]:
    """Turn the passing of `deadline` (Unix seconds) inside the block into DeadlineExceeded."""
    time_left = Deadline(deadline, timeout_seconds)
    try:
        async with time_left:
            yield
    finally:
        time_left.close()

"""Runs a text request: prepare, admit, submit, detokenize, stop.

Endpoints hand over a raw body, which a `Preparer` checks and tokenizes in another process. `TextService.start` takes a
`CompletionRequest` or a `ChatRequest` instead. Both return running `TextStream`s.
"""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import TracebackType
from typing import Any, Protocol

import anyio
import msgspec

from control_plane.accounts.identity import Caller
from control_plane.accounts.ledger import Status
from control_plane.accounts.metering import BilledRequest, LedgerEntry, Meter, Unmetered
from control_plane.generation import (
    Dispatcher,
    ModelCatalog,
    ModelDescription,
    PositionLogprobs,
    TokenDelta,
    TokenIds,
    TokenRequest,
    TokenStream,
    Usage,
)
from control_plane.text.choice import ChoiceText, TextDelta, TextLogprobs
from control_plane.text.prepared import (
    AnswerForm,
    Asked,
    ParsedBody,
    Preparation,
    PreparedBody,
    PreparedPrompt,
    TextJob,
)
from control_plane.text.prompt_logprobs import prompt_logprobs
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.request import ChatRequest, CompletionRequest, session_key
from control_plane.text.telemetry import GenerationMeter, GenerationRecord
from control_plane.text.tokenizer import TokenizerCache
from control_plane.text.tools.forms import form_named
from control_plane.text.tools.parser import CallParser
from control_plane.text.tools.planning import call_id
from control_plane.text.vocabulary import Vocabulary
from tandem_runtime import tracing
from tandem_runtime.errors import Cancelled, DeadlineExceeded, InternalError, note_work

DEFAULT_TIMEOUT_SECONDS = 600.0
FALLBACK_HEADER = "tandem-fallback-model"
"""Response header with the model that answered in place of the requested one."""

_CONTEXT_TOKENS = 64
"""Tokens of a prompt that the detokenizer of its continuation gets; it uses fewer."""

Parse = Callable[[TextJob, bytes], ParsedBody]
Resolve = Callable[[Asked], Awaitable[ModelDescription]]


class Preparer(Protocol):
    async def prepare(
        self, job: TextJob, raw: bytes, account: str, parse: Parse, resolve: Resolve
    ) -> tuple[PreparedBody, Vocabulary]:
        """Check, render and tokenize a body. Raise TandemError.

        `resolve` finds the model once the body was parsed; it may be called again with the same argument. `parse` is
        the function that parses the body where it is prepared; a text process has its own.
        """


class InlinePreparer:
    """Prepares bodies where it is called, on the event loop: for tests and tools, not for the bodies of strangers."""

    def __init__(self, preparation: Preparation, tokenizers: TokenizerCache) -> None:
        self._preparation = preparation
        self._tokenizers = tokenizers

    async def prepare(
        self, job: TextJob, raw: bytes, account: str, parse: Parse, resolve: Resolve
    ) -> tuple[PreparedBody, Vocabulary]:
        parsed = parse(job, raw)
        model = await resolve(parsed.asked)
        tokenizer = await self._tokenizers.get(model)
        return self._preparation.body(parsed, model.facts, tokenizer, job.salt), tokenizer.vocabulary


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
        preparer: Preparer | None = None,
        salt_of: Callable[[str], bytes] | None = None,
    ) -> None:
        """`salt_of` returns the salt of an account's block hashes; without it, the dispatcher hashes."""
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._default_timeout_seconds = default_timeout_seconds
        self._tokenizers = TokenizerCache()
        self._preparation = Preparation(public_prefixes=public_prefixes)
        self._preparer = preparer or InlinePreparer(self._preparation, self._tokenizers)
        self._salt_of = salt_of
        self._meter = GenerationMeter()
        self._accounts: Meter = meter or Unmetered()

    async def start(self, request: CompletionRequest | ChatRequest) -> TextStream:
        """Return the stream as soon as a worker has accepted the request. Raise TandemError if none does.

        The caller owns the stream and closes it. If this is cancelled, the request is cancelled, too.
        """
        return await self.start_prepared(await self.prepare(request))

    async def prepare(self, request: CompletionRequest | ChatRequest) -> Prompt:
        """Tokenize a request here and start its deadline, without admission. Raise TandemError."""
        asked = _with_options_of(request.caller, Asked.of(request))
        opened: _Opened | None = None
        try:
            async with self._preparing() as time_left:
                opened = await self._open(asked, request.caller, time_left)
                tokenizer = await self._tokenizers.get(opened.model)
                prepared = self._preparation.prompt(request, opened.model.facts, tokenizer, None, with_text=False)
        except BaseException as error:
            if opened is not None:
                opened.failed(error)
            raise
        (prompt,) = opened.prompts((prepared,), tokenizer.vocabulary)
        return prompt

    async def prepare_body(self, job: TextJob, raw: bytes, caller: Caller, parse: Parse) -> PreparedAnswer:
        """Check and tokenize a raw body in another process, and start the deadline, without admission.

        Raise TandemError.
        """
        if self._salt_of is not None:
            job = msgspec.structs.replace(job, salt=self._salt_of(caller.account))
        opened: _Opened | None = None

        async def resolve(asked: Asked) -> ModelDescription:
            nonlocal opened
            if opened is None:
                opened = await self._open(asked, caller, time_left)
            return opened.model

        try:
            async with self._preparing() as time_left:
                span = tracing.tracer().start_span("tokenize")  # not current: the record belongs to the request's span
                try:
                    body, vocabulary = await self._preparer.prepare(job, raw, caller.account, parse, resolve)
                finally:
                    span.end()
        except BaseException as error:
            if opened is not None:
                opened.failed(error)
            raise
        assert opened is not None, "a body is prepared for its model"
        return PreparedAnswer(body.form, opened.prompts(body.prompts, vocabulary))

    @asynccontextmanager
    async def _preparing(self) -> AsyncIterator[Deadline]:
        """Limit what happens inside to the request's time, which counts from here."""
        seconds = self._default_timeout_seconds
        time_left = Deadline(time.time() + seconds, seconds)
        try:
            async with time_left:
                yield time_left
        finally:
            time_left.close()

    async def _open(self, asked: Asked, caller: Caller, time_left: Deadline) -> _Opened:
        """Find the model of a request. Raise ModelNotFound."""
        if asked.timeout_seconds is not None:
            time_left.shorten(asked.timeout_seconds)
        records = [GenerationRecord(self._meter, asked) for _ in range(asked.num_prompts)]
        try:
            model = await self._catalog.get(asked.model)
        except BaseException as error:
            for record in records:
                record.failed(error)
            raise
        for record in records:
            record.model_found(model)
        if model.is_fallback:
            caller.answer_headers[FALLBACK_HEADER] = model.model_id
        return _Opened(asked, caller, model, time_left, records)

    async def start_prepared(self, prompt: Prompt) -> TextStream:
        """Admit and submit a prepared prompt. Raise TandemError."""
        with _recorded(prompt.record):
            async with _until(prompt.token_request.deadline, prompt.timeout_seconds):
                entry = await self._accounts.admit(prompt.caller, BilledRequest.for_answer(prompt.token_request))
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
                entry = await self._accounts.admit(prompt.caller, BilledRequest.for_prompt_scores(prompt.token_request))
                found, used = await self._score(prompt.token_request, num_logprobs, entry)
        text = ChoiceText(prompt.vocabulary)
        token_ids = tuple(prompt.token_ids)
        text.push(TokenDelta(0, token_ids[:1]))
        return text.push(TokenDelta(0, token_ids[1:], tuple(found), "length")).logprobs, entry.priced(used)

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


def _with_options_of(caller: Caller, asked: Asked) -> Asked:
    """Return `asked` with the options for waiting that the caller has already."""
    return msgspec.structs.replace(asked, reject_if_busy=caller.reject_if_busy, timeout_seconds=caller.timeout_seconds)


@dataclass(frozen=True)
class _Opened:
    """A request whose model is known, with one record for each of its prompts."""

    asked: Asked
    caller: Caller
    model: ModelDescription
    time_left: Deadline
    records: Sequence[GenerationRecord]

    def failed(self, error: BaseException) -> None:
        for record in self.records:
            record.failed(error)

    def prompts(self, prepared: Sequence[PreparedPrompt], vocabulary: Vocabulary) -> list[Prompt]:
        """Return the prompts; each after the first has a request id of its own."""
        caller = replace(self.caller, reject_if_busy=self.asked.reject_if_busy)
        ids = [caller.request_id, *(f"{caller.request_id}-{index}" for index in range(1, len(prepared)))]
        return [
            Prompt(
                replace(caller, request_id=request_id),
                self.model,
                vocabulary,
                each,
                _token_request(each, request_id, caller, self.model, self.time_left.at_unix),
                self.time_left.timeout_seconds,
                record,
            )
            for each, request_id, record in zip(prepared, ids, self.records, strict=True)
        ]


def _token_request(
    prepared: PreparedPrompt, request_id: str, caller: Caller, model: ModelDescription, deadline: float
) -> TokenRequest:
    return TokenRequest(
        request_id=request_id,
        account=caller.account,
        model_id=model.model_id,
        token_ids=TokenIds.unpack(prepared.token_ids),
        sampling=prepared.sampling,
        choice_seeds=prepared.choice_seeds,
        deadline=deadline,
        salt=prepared.cache_salt.encode(),
        cache=prepared.cache,
        num_public_tokens=prepared.num_public_tokens,
        fairness_key=caller.account,
        session_affinity=session_key(caller.account, model.model_id, caller.session_affinity),
        reject_if_busy=caller.reject_if_busy,
        wire=prepared.wire,
    )


@dataclass(frozen=True)
class PreparedAnswer:
    """A prepared body: how its answer is written, and its prompts."""

    form: AnswerForm
    prompts: Sequence[Prompt]


@dataclass(frozen=True)
class Prompt:
    """A tokenized request, with its model, vocabulary, deadline and record."""

    caller: Caller
    model: ModelDescription
    vocabulary: Vocabulary
    prepared: PreparedPrompt
    token_request: TokenRequest
    timeout_seconds: float
    record: GenerationRecord

    @property
    def token_ids(self) -> Sequence[int]:
        return self.token_request.token_ids

    @property
    def num_choices(self) -> int:
        return len(self.token_request.choice_seeds)

    @property
    def text(self) -> str:
        """The prompt as text."""
        return self.vocabulary.decode(self.token_ids) if self.prepared.text is None else self.prepared.text


class TextStream:
    """The answer to one request, all choices, as text. Iterate once; close at any time."""

    def __init__(self, tokens: TokenStream, prompt: Prompt, entry: LedgerEntry) -> None:
        self.prompt = prompt
        self._tokens = tokens
        self._record = prompt.record
        self._entry = entry
        self._has_tokens = False
        self._choices = [_new_choice(prompt, index) for index in range(prompt.num_choices)]

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
        if error is not None and self._has_tokens:
            note_work(error)
        if not self._has_tokens and (status == "cancelled" or isinstance(error, DeadlineExceeded)):
            # The client left, or set a deadline: it pays for what workers report as computed.
            self._entry.close_unfinished(status, self._tokens.num_unfinished_tokens, name)
        else:
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
    prepared, calls = prompt.prepared, None
    if prepared.tool_form:
        calls = CallParser(form_named(prepared.tool_form), partial(call_id, prompt.token_request.request_id, index))
    return ChoiceText(
        prompt.vocabulary,
        context_ids=tuple(prompt.token_ids[-_CONTEXT_TOKENS:]) if prepared.continues_text else (),
        stop_strings=prepared.stop,
        stop_token_ids=prepared.sampling.stop_token_ids,
        calls=calls,
        shown_ids=prepared.shown_ids,
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
        """`at`: Unix seconds. `timeout_seconds` is the whole time, for `shorten` and the error message."""
        self.at_unix = at
        self.timeout_seconds = timeout_seconds
        self._has_passed = False
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + at - time.time()
        self._timer = self._loop.call_at(self._at, self._pass)

    def shorten(self, timeout_seconds: float) -> None:
        """Limit the whole time to `timeout_seconds`, if that is less."""
        sooner = self.timeout_seconds - timeout_seconds
        if sooner > 0 and not self._has_passed:
            self._timer.cancel()
            self.at_unix, self._at, self.timeout_seconds = self.at_unix - sooner, self._at - sooner, timeout_seconds
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
            f"the request took longer than its {self.timeout_seconds:g} seconds; request fewer tokens or more time"
        )

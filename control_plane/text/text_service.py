"""Starts a text request: prepare, admit, submit.

Endpoints hand over a raw body, which a `Preparer` checks and tokenizes in another process. `TextService.start` takes a
`CompletionRequest` or a `ChatRequest` instead. Both return running `TextStream`s.
"""

from __future__ import annotations

import operator
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import anyio
import msgspec

from control_plane.accounts.identity import Caller
from control_plane.accounts.metering import BilledRequest, LedgerEntry, Meter, Unmetered
from control_plane.admission.service_classes import ServiceClass
from control_plane.explain.requests import Requests
from control_plane.explain.timeline import Timeline
from control_plane.generation import (
    Dispatcher,
    EncodingDispatcher,
    EncodingRequest,
    ModelCatalog,
    ModelDescription,
    PositionLogprobs,
    TokenDelta,
    TokenIds,
    TokenRequest,
    TokenStream,
    Usage,
)
from control_plane.text.choice import ChoiceText, TextLogprobs
from control_plane.text.deadline import Deadline, until
from control_plane.text.early_refusals import Door, EarlyRefusals
from control_plane.text.prepared import (
    AnswerForm,
    Asked,
    EncodedForm,
    Parsed,
    Preparation,
    PreparedBody,
    PreparedPrompt,
    PreparedTexts,
    TextJob,
)
from control_plane.text.prompt_logprobs import prompt_logprobs
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.request import ChatRequest, CompletionRequest, session_key
from control_plane.text.telemetry import GenerationMeter, GenerationRecord
from control_plane.text.text_stream import Prompt, TextStream, outcome
from control_plane.text.tokenizer import TokenizerCache
from control_plane.text.vocabulary import Vocabulary
from tandem_runtime import tracing
from tandem_runtime.errors import InvalidRequest

DEFAULT_TIMEOUT_SECONDS = 600.0
_MAX_NAMED = 8
"""Models that an error message names."""
FALLBACK_HEADER = "tandem-fallback-model"
"""Response header with the model that answered in place of the requested one."""

Parse = Callable[[TextJob, bytes], Parsed]
Resolve = Callable[[Asked], Awaitable[ModelDescription]]


class Preparer(Protocol):
    async def prepare(
        self,
        job: TextJob,
        raw: bytes,
        account: str,
        parse: Parse,
        resolve: Resolve,
        on_begun: Callable[[], None] | None = None,
    ) -> tuple[PreparedBody, Vocabulary]:
        """Check, render and tokenize a body. Raise TandemError.

        `resolve` finds the model once the body was parsed; it may be called again with the same argument. `parse` is
        the function that parses the body where it is prepared; a text process has its own. `on_begun` is called when
        the body no longer waits, again if its preparation begins again.
        """


class InlinePreparer:
    """Prepares bodies where it is called, on the event loop: for tests and tools, not for the bodies of strangers."""

    def __init__(self, preparation: Preparation, tokenizers: TokenizerCache) -> None:
        self._preparation = preparation
        self._tokenizers = tokenizers

    async def prepare(
        self,
        job: TextJob,
        raw: bytes,
        account: str,
        parse: Parse,
        resolve: Resolve,
        on_begun: Callable[[], None] | None = None,
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
        strict_fields: bool = False,
        encoders: EncodingDispatcher | None = None,
        requests: Requests | None = None,
        priority_accounts: Collection[str] = (),
        door: Door | None = None,
    ) -> None:
        """`salt_of` returns the salt of an account's block hashes; without it, the dispatcher hashes.

        `strict_fields`: refuse fields that change nothing. `encoders` answers embeddings, rankings and classes.
        `requests` follows all requests, for their explanations. `priority_accounts`: see `class_of`.
        `door` refuses requests before they are tokenized.
        """
        self._early = EarlyRefusals(door, catalog, priority_accounts)
        self.requests = requests or Requests()
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._default_timeout_seconds = default_timeout_seconds
        self._tokenizers = TokenizerCache()
        self._preparation = Preparation(public_prefixes=public_prefixes)
        self._preparer = preparer or InlinePreparer(self._preparation, self._tokenizers)
        self._salt_of = salt_of
        self._strict_fields = strict_fields
        self._encoders = encoders
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

    async def refuse_early(self, job: TextJob, raw: bytes, caller: Caller) -> None:
        """Raise Overloaded for a body of a crowded model that would not be let in in time. Costs little: no task."""
        await self._early.check_unparsed(job, raw, caller)

    async def prepare_body(self, job: TextJob, raw: bytes, caller: Caller, parse: Parse) -> PreparedAnswer:
        """Check and tokenize a raw body in another process, and start the deadline, without admission.

        Raise TandemError.
        """
        body, opened, vocabulary = await self._prepare_body(job, raw, caller, parse)
        if body.texts is not None:
            encoding = PreparedEncoding(opened, body.texts.form, opened.encoding(body.texts))
            num_tokens = sum(each.num_tokens for each in body.texts.inputs)
            opened.records[0].journal.prepared(encoding.request.history, num_tokens)
            return PreparedAnswer(body.form, [], encoding)
        return PreparedAnswer(body.form, opened.prompts(body.prompts, vocabulary))

    async def _prepare_body(
        self, job: TextJob, raw: bytes, caller: Caller, parse: Parse
    ) -> tuple[PreparedBody, _Opened, Vocabulary]:
        salt = None if self._salt_of is None else self._salt_of(caller.account)
        job = msgspec.structs.replace(job, salt=salt, strict_fields=self._strict_fields)
        opened: _Opened | None = None
        timeline = caller.timeline or Timeline()
        caller = replace(caller, timeline=timeline)

        async def resolve(asked: Asked) -> ModelDescription:
            nonlocal opened
            if opened is None:
                opened = await self._open(asked, caller, time_left)
                self._early.check_parsed(asked, opened.model, caller, len(raw))
            return opened.model

        try:
            async with self._preparing() as time_left:
                span = tracing.tracer().start_span("tokenize")  # not current: the record belongs to the request's span
                try:
                    body, vocabulary = await self._preparer.prepare(
                        job, raw, caller.account, parse, resolve, timeline.text_begun
                    )
                finally:
                    span.end()
                    timeline.end("text")
        except BaseException as error:
            if opened is not None:
                opened.failed(error)
            raise
        assert opened is not None, "a body is prepared for its model"
        self._early.prepared(opened.model, len(raw), body.prompts)
        return body, opened, vocabulary

    async def encode(self, prepared: PreparedEncoding) -> Encoded:
        """Admit prepared texts and have them encoded. Raise TandemError.

        Who leaves before the answer pays for the parts that workers had encoded.
        """
        opened, request = prepared.opened, prepared.request
        (record,) = opened.records
        assert self._encoders is not None, "a gateway with encoder models has a dispatcher for them"
        computed: list[int] = []
        with _recorded(record):
            async with until(request.deadline, opened.time_left.timeout_seconds):
                journal = record.journal
                billed = BilledRequest.for_texts(request)
                entry = await self._accounts.admit(opened.caller, billed, journal.closed)
                journal.admitted()
                try:
                    await entry.opened()
                    journal.opened()
                    values = await self._encoders.encode(request, computed)
                except BaseException as error:
                    journal.stopped()
                    status, _, reasons, name = outcome(error)
                    used = Usage(sum(computed), sum(computed), 0, 0) if computed else None
                    entry.close(status, used, reasons, name)
                    raise
        num_tokens = sum(computed)
        usage = entry.priced(Usage(num_tokens, num_tokens, 0, 0))
        entry.close("finished", usage)
        record.finished(usage, ())
        return Encoded(prepared.form, opened.model, values, usage)

    async def convert(self, job: TextJob, raw: bytes, caller: Caller, parse: Parse) -> bytes:
        """Return the answer to a body that a text process alone answers. No worker takes part.

        A body without a model's name is for the only model. Raise TandemError.
        """

        async def resolve(asked: Asked) -> ModelDescription:
            return await self._catalog.get(asked.model or _only(self._catalog.list()))

        timeline = caller.timeline or Timeline()
        async with self._preparing():
            body, _ = await self._preparer.prepare(job, raw, caller.account, parse, resolve, timeline.text_begun)
        timeline.end("text")
        return body.converted

    @asynccontextmanager
    async def _preparing(self) -> AsyncIterator[Deadline]:
        """Limit what happens inside to the request's time, which counts from here."""
        seconds = self._default_timeout_seconds
        time_left = Deadline(time.monotonic() + seconds, seconds)
        try:
            async with time_left:
                yield time_left
        finally:
            time_left.close()

    async def _open(self, asked: Asked, caller: Caller, time_left: Deadline) -> _Opened:
        """Find the model of a request. Raise ModelNotFound."""
        if asked.timeout_seconds is not None:
            time_left.shorten(asked.timeout_seconds)
        timeline = caller.timeline or Timeline()
        records = [
            GenerationRecord(
                self._meter, asked, self.requests.open(timeline, request_id, caller.account, asked.operation)
            )
            for request_id in _ids(caller.request_id, asked.num_prompts)
        ]
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
        return _Opened(asked, caller, model, time_left, records, self._early.class_of(asked, caller))

    async def start_prepared(self, prompt: Prompt) -> TextStream:
        """Admit and submit a prepared prompt. Raise TandemError."""
        with _recorded(prompt.record):
            async with until(prompt.token_request.deadline, prompt.timeout_seconds):
                journal = prompt.record.journal
                billed = BilledRequest.for_answer(prompt.token_request)
                entry = await self._accounts.admit(prompt.caller, billed, journal.closed)
                journal.admitted()
                tokens = await self._submit(prompt.token_request, entry)
                journal.opened()
        return TextStream(tokens, prompt, entry)

    async def _submit(self, request: TokenRequest, entry: LedgerEntry) -> TokenStream:
        """Submit an admitted request while its ledger row is written, and wait for both.

        A row that cannot be written ends the submission at once. While the rows before it could not be, the request is
        not submitted before its row is written.
        """
        tokens = None
        try:
            await entry.expected()
            with anyio.CancelScope() as scope:
                entry.when_refused(scope.cancel)
                tokens = await self._dispatcher.submit(request)
            await entry.opened()
            assert tokens is not None, "only a row that cannot be written ends the submission"
        except BaseException as error:
            if tokens is not None:
                with anyio.CancelScope(shield=True):
                    await tokens.aclose()
            entry.close(*outcome(error))
            raise
        return tokens

    async def prompt_logprobs(self, prompt: Prompt, num_logprobs: int) -> tuple[tuple[TextLogprobs, ...], Usage]:
        """Return the log probabilities of every token of a prompt but the first, and their usage. Raise TandemError.

        Scoring is admitted and has a ledger row like a request of its own.
        """
        if len(prompt.token_ids) == 1:
            return (), Usage(0, 0, 0, 0)
        with _recorded(prompt.record):
            async with until(prompt.token_request.deadline, prompt.timeout_seconds):
                entry = await self._accounts.admit(prompt.caller, BilledRequest.for_prompt_scores(prompt.token_request))
                found, used = await self._score(prompt.token_request, num_logprobs, entry)
        if prompt.caller.timeline is not None:
            prompt.caller.timeline.end("score")
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
            status, _, reasons, name = outcome(error)
            entry.close(status, _sum(used) if used else None, reasons, name)
            raise
        entry.close("finished", _sum(used))
        return found, _sum(used)


def _only(models: Sequence[ModelDescription]) -> str:
    """Return the name of the only model. Raise InvalidRequest."""
    if len(models) != 1:
        names = ", ".join(model.model_id for model in models[:_MAX_NAMED]) or "none yet"
        raise InvalidRequest(f"model is missing, and the models served here are {names}; send one", field="model")
    return models[0].model_id


def _with_options_of(caller: Caller, asked: Asked) -> Asked:
    """Return `asked` with the options for waiting that the caller has already."""
    return msgspec.structs.replace(asked, reject_if_busy=caller.reject_if_busy, timeout_seconds=caller.timeout_seconds)


@dataclass(frozen=True)
class PreparedEncoding:
    """Texts that are ready for an encoder, with the form of their answer."""

    opened: _Opened
    form: EncodedForm
    request: EncodingRequest


@dataclass(frozen=True)
class Encoded:
    """What an encoder has made of a request's texts."""

    form: EncodedForm
    model: ModelDescription
    values: bytes
    """float32, little-endian: [inputs, num_values]."""
    usage: Usage


@dataclass(frozen=True)
class _Opened:
    """A request whose model is known, with one record for each of its prompts."""

    asked: Asked
    caller: Caller
    model: ModelDescription
    time_left: Deadline
    records: Sequence[GenerationRecord]
    service_class: ServiceClass

    def failed(self, error: BaseException) -> None:
        for record in self.records:
            record.failed(error)

    def encoding(self, texts: PreparedTexts) -> EncodingRequest:
        caller = self.caller
        return EncodingRequest(
            caller.request_id,
            caller.account,
            self.model,
            texts.inputs,
            self.time_left.at,
            texts.pooling,
            caller.reject_if_busy or self.asked.reject_if_busy,
            self.service_class,
        )

    def prompts(self, prepared: Sequence[PreparedPrompt], vocabulary: Vocabulary) -> list[Prompt]:
        """Return the prompts; each after the first has a request id of its own."""
        caller = replace(self.caller, reject_if_busy=self.asked.reject_if_busy)
        ids = _ids(caller.request_id, len(prepared))
        prompts = [
            Prompt(
                replace(caller, request_id=request_id),
                self.model,
                vocabulary,
                each,
                _token_request(each, request_id, caller, self),
                self.time_left.timeout_seconds,
                record,
            )
            for each, request_id, record in zip(prepared, ids, self.records, strict=True)
        ]
        for prompt in prompts:
            prompt.record.journal.prepared(prompt.token_request.history, len(prompt.token_ids), prompt)
        return prompts


def _ids(request_id: str, num_prompts: int) -> list[str]:
    """Return the ids of an HTTP request's prompts; each after the first has one of its own."""
    return [request_id, *(f"{request_id}-{index}" for index in range(1, num_prompts))]


def _token_request(prepared: PreparedPrompt, request_id: str, caller: Caller, opened: _Opened) -> TokenRequest:
    model = opened.model
    return TokenRequest(
        request_id=request_id,
        account=caller.account,
        model_id=model.model_id,
        token_ids=TokenIds.unpack(prepared.token_ids),
        sampling=prepared.sampling,
        choice_seeds=prepared.choice_seeds,
        deadline=opened.time_left.at,
        salt=prepared.cache_salt.encode(),
        cache=prepared.cache,
        num_public_tokens=prepared.num_public_tokens,
        priority=opened.service_class,
        session_affinity=session_key(caller.account, model.model_id, caller.session_affinity or opened.asked.session),
        reject_if_busy=caller.reject_if_busy,
        adapter=model.adapter,
        wire=prepared.wire,
    )


@dataclass(frozen=True)
class PreparedAnswer:
    """A prepared body: how its answer is written, and its prompts or its texts."""

    form: AnswerForm
    prompts: Sequence[Prompt]
    encoding: PreparedEncoding | None = None
    """Of a body for an encoder; its answer has a form of its own."""


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

"""Turns the tokens of one answer into text: detokenizes, stops, and closes the answer's ledger row."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio

from control_plane.accounts.identity import Caller
from control_plane.accounts.ledger import Status
from control_plane.accounts.metering import LedgerEntry
from control_plane.drain import GatewayDraining
from control_plane.explain.history import History
from control_plane.generation import ModelDescription, TokenDelta, TokenRequest, TokenStream, Usage
from control_plane.text.choice import ChoiceText, TextDelta
from control_plane.text.deadline import Deadline
from control_plane.text.prepared import PreparedPrompt
from control_plane.text.telemetry import GenerationRecord
from control_plane.text.thinking.planning import splitter_of
from control_plane.text.tools.forms import form_named
from control_plane.text.tools.parser import CallParser
from control_plane.text.tools.planning import call_id
from control_plane.text.vocabulary import Vocabulary
from tandem_runtime.errors import Cancelled, DeadlineExceeded, InternalError, note_work

_CONTEXT_TOKENS = 64
"""Tokens of a prompt that the detokenizer of its continuation gets; it uses fewer."""


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

    def beginning(self, max_tokens: int) -> str:
        """Return the text of the prompt's first tokens, control tokens included; for explanations."""
        return self.vocabulary.decode(self.token_ids[:max_tokens], skip_special_tokens=False)

    def decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens; for explanations."""
        return self.vocabulary.decode(token_ids)


class TextStream:
    """The answer to one request, all choices, as text. Iterate once; close at any time."""

    def __init__(self, tokens: TokenStream, prompt: Prompt, entry: LedgerEntry) -> None:
        self.prompt = prompt
        self._tokens = tokens
        self._record = prompt.record
        self._entry = entry
        self._journal = prompt.record.journal
        self._has_tokens = False
        self._has_text = False
        self._gaps = prompt.record.new_gaps(prompt.model.model_id)
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
        used = self._entry.priced(self._tokens.usage)
        num_thinking_tokens = sum(choice.num_thinking_tokens for choice in self._choices)
        return replace(used, num_thinking_tokens=num_thinking_tokens) if num_thinking_tokens else used

    @property
    def histories(self) -> Sequence[History]:
        return (self.prompt.token_request.history,)

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
                yield self._texts(batch) if self._has_text else self._first_texts(batch)
            reasons = self._finish_reasons()
            self._record.finished(self.usage, reasons)
            self._entry.close("finished", self.usage, " ".join(dict.fromkeys(reasons)))
        except BaseException as error:
            self._record.failed(error)
            self._close_entry(error)
            raise
        finally:
            await self.aclose()

    def _first_texts(self, batch: Iterator[TokenDelta]) -> Iterator[TextDelta]:
        """Yield a batch's texts, and note when the first one is ready; later batches are read without this."""
        for text in self._texts(batch):
            self._journal.text_arrived()
            self._has_text = True
            yield text

    def _texts(self, batch: Iterator[TokenDelta]) -> Iterator[TextDelta]:
        try:
            for delta in batch:
                text = self._push(delta)
                if text is not None:
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
        """Close the ledger entry of an incomplete answer: failed or aborted if there is an error, else cancelled."""
        status, _, reasons, name = outcome(error)
        self._journal.stopped()
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
                if len(self._choices) == 1:
                    self._gaps.arrived()
                yield batch
        finally:
            deadline.close()

    def _push(self, delta: TokenDelta) -> TextDelta | None:
        choice = self._choices[delta.choice_index]
        if choice.finish_reason is not None:  # tokens that were in flight when a stop string ended the choice
            return None
        text = choice.push(delta)
        if choice.finish_reason is not None and delta.finish_reason is None:  # a stop string ended the choice
            self._tokens.stop_choice(delta.choice_index)
        return text if text.text or text.thinking or text.calls or text.logprobs or text.finish_reason else None


def outcome(error: BaseException | None) -> tuple[Status, None, str, str]:
    """Return status, usage, finish reasons and error of an incomplete request, as `LedgerEntry.close` takes them."""
    if isinstance(error, GatewayDraining):
        return "aborted", None, "", type(error).__name__
    if isinstance(error, Exception) and not isinstance(error, Cancelled):
        return "failed", None, "", type(error).__name__
    return "cancelled", None, "", ""


def _new_choice(prompt: Prompt, index: int) -> ChoiceText:
    """Return the text of a new choice. A completion continues its prompt's text; a chat answer does not."""
    prepared, calls = prompt.prepared, None
    if prepared.tool_form:
        calls = CallParser(form_named(prepared.tool_form), partial(call_id, prompt.token_request.request_id, index))
    thinking, shown_ids = prepared.thinking, prepared.shown_ids
    splitter = splitter_of(thinking)
    if splitter is not None and thinking is not None:
        shown_ids = (*shown_ids, *thinking.shown_ids)
    return ChoiceText(
        prompt.vocabulary,
        context_ids=tuple(prompt.token_ids[-_CONTEXT_TOKENS:]) if prepared.continues_text else (),
        stop_strings=prepared.stop,
        stop_token_ids=prepared.sampling.stop_token_ids,
        calls=calls,
        shown_ids=shown_ids,
        splitter=splitter,
    )

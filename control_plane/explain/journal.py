"""Follows one prompt from its model's look-up to the end of its ledger row.

The text side calls the methods below in the order that a request meets them. Each costs some hundred nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from opentelemetry import trace

from control_plane.explain.explanation import Explanation, State
from control_plane.explain.history import History
from control_plane.explain.timeline import Timeline


class Closing(Protocol):
    """The end of a ledger row. See control_plane.accounts.ledger.Closing."""

    @property
    def status(self) -> State: ...

    @property
    def usage(self) -> Any: ...

    @property
    def finish_reasons(self) -> str: ...

    @property
    def error(self) -> str: ...


class PromptText(Protocol):
    """A prompt that can be shown as text, and its answer."""

    def beginning(self, max_tokens: int) -> str:
        """Return the prompt's text up to a number of tokens."""

    def decoded(self, token_ids: Sequence[int]) -> str:
        """Return an answer's tokens as text."""


class Owner(Protocol):
    """Takes a journal that has ended."""

    def first_token_left(self, journal: Journal) -> None: ...

    def ended(self, journal: Journal) -> Explanation: ...


class Journal:
    """One prompt, on one event loop; an HTTP request may have several."""

    __slots__ = (
        "_owner",
        "account",
        "admitted_at",
        "closing",
        "ended_at",
        "error",
        "explanation",
        "history",
        "is_admitted",
        "model",
        "num_prompt_tokens",
        "opened_at",
        "operation",
        "prompt",
        "request_id",
        "requested_model",
        "span",
        "text_at",
        "timeline",
    )

    def __init__(self, owner: Owner, timeline: Timeline, request_id: str, account: str, operation: str) -> None:
        """The span of the trace is the current span."""
        self._owner = owner
        self.timeline = timeline
        self.request_id = request_id
        self.account = account
        self.operation = operation
        self.model = ""
        self.requested_model = ""
        self.num_prompt_tokens = 0
        self.history = History()
        self.is_admitted = False
        self.admitted_at: float | None = None
        self.opened_at: float | None = None
        self.text_at: float | None = None
        self.ended_at: float | None = None
        self.error = ""
        self.closing: Closing | None = None
        self.explanation: Explanation | None = None
        self.span = trace.get_current_span().get_span_context()
        self.prompt: PromptText | None = None
        timeline.parts.append(self)

    @property
    def is_over(self) -> bool:
        return self.explanation is not None

    def model_found(self, model_id: str, requested_model: str) -> None:
        """`requested_model`: "" unless it is a name of a served model."""
        self.model, self.requested_model = model_id, requested_model

    def prepared(self, history: History, num_prompt_tokens: int, prompt: PromptText | None = None) -> None:
        """The prompt is tokenized; the dispatcher will write into `history`. `prompt`: its text, if it is one."""
        self.history = history
        self.num_prompt_tokens = num_prompt_tokens
        self.prompt = prompt

    def admitted(self) -> None:
        """The limits permit the request: it has a ledger row, which `closed` ends."""
        self.is_admitted = True
        self.admitted_at = time.perf_counter()

    def opened(self) -> None:
        """The ledger row is written, and the workers have accepted the request."""
        self.opened_at = time.perf_counter()

    def text_arrived(self) -> None:
        """The first text is ready to be sent."""
        if self.text_at is None:
            self.text_at = time.perf_counter()
            if self.timeline.written_at is not None:  # a piece without text was written before
                self._owner.first_token_left(self)

    def written(self) -> None:
        """The first piece of the stream was handed to the connection, with this prompt's first text or without."""
        if self.text_at is not None:
            self._owner.first_token_left(self)

    def stopped(self) -> None:
        """The answer has ended; the ledger row may end later."""
        if self.ended_at is None:
            self.ended_at = time.perf_counter()

    def failed(self, error: BaseException) -> None:
        """End a request that has no ledger row; the row of another one ends it."""
        self.stopped()
        self.error = type(error).__name__
        if not self.is_admitted:
            self._end()

    def left(self) -> None:
        """End a prompt that was never admitted: its HTTP request has ended, with another prompt's error perhaps."""
        if not self.is_admitted and not self.is_over:
            self.stopped()
            self._end()

    def closed(self, closing: Closing) -> None:
        """The ledger row has ended."""
        self.closing = closing
        self.stopped()
        self._end()

    def _end(self) -> None:
        if self.explanation is None:
            self.explanation = self._owner.ended(self)
            self.prompt = None

    @property
    def state(self) -> State:
        if self.closing is not None:
            return self.closing.status
        if self.ended_at is not None:
            if self.error == "GatewayDraining":
                return "aborted"
            return "cancelled" if self.error in ("", "Cancelled", "CancelledError", "GeneratorExit") else "failed"
        return "queued" if self.history.accepted_at is None else "running"

    @property
    def ttft_seconds(self) -> float | None:
        """From the HTTP request's arrival to the first token's departure; None: there is none."""
        at = self.first_token_at
        return None if at is None else at - self.timeline.started

    @property
    def first_token_at(self) -> float | None:
        """When the first token had left, or was ready to be sent with the whole answer."""
        written_at = self.timeline.written_at
        return self.text_at if self.text_at is None or written_at is None else max(self.text_at, written_at)

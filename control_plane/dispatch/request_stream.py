"""What is one request doing on its workers, and which tokens go to the client?

A `Flight` runs both halves of a request. Prefill's first token and decode's stream (which repeats it) are merged by
absolute position, so a token that comes twice is passed on once, and it does not matter who is faster or who dies. A
choice whose decode worker is lost goes on elsewhere from its very next token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from control_plane.dispatch.usage import Phase, work_of
from control_plane.dispatch.wakeups import Pace
from control_plane.dispatch.worker_call import Leg
from control_plane.generation import FinishReason, Logprob, PositionLogprobs, TokenDelta, TokenRequest, Usage
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Aborted, DeadlineExceeded, InternalError, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_LEDGER_SECONDS = 2.0
GRACE_SECONDS = 1.0
"""Workers end a request at its deadline by themselves, and say so; this is for those that cannot any more."""

MAX_UNREAD_TOKENS = 8192
"""Of one request; a client that reads slower than its answer is written may be behind by so many."""

FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Diverged(InternalError):
    """A worker's tokens do not fit those the client has: it goes on from those instead."""


@dataclass(eq=False)
class Choice:
    """One run of generated tokens."""

    index: int
    tokens: list[int] = field(default_factory=list)
    leg: Leg | None = None
    num_delivered: int = 0
    is_over: bool = False
    """Finished or stopped: what workers still say of it is not passed on."""
    is_stopped: bool = False
    is_told: bool = False
    """The client has its end, or wants no more of it: what goes wrong afterwards is none of its business."""
    num_losses: int = 0
    """How many workers it was lost with, those that drained not counted."""
    lost_with: set[str] = field(default_factory=set)
    """Incarnations that it was lost with since its last new token."""
    deaths: set[str] = field(default_factory=set)
    """Those of them that died."""
    ledger: pb.PhaseLedger | None = None
    prompt_ledger: pb.PhaseLedger | None = None
    """Of the leg that read the prompt, if that lived to tell: one that went on elsewhere tells of another text."""


class Flight:
    """Implements control_plane.generation.TokenStream; made by the dispatcher, on one event loop."""

    def __init__(
        self, request: TokenRequest, pace: Pace | None = None, max_unread_tokens: int = MAX_UNREAD_TOKENS
    ) -> None:
        """`pace`: that of all flights on this event loop."""
        self.request = request
        self.on_close: Callable[[], None] | None = None
        self.on_finished: Callable[[], None] = lambda: None
        """Called when every token has been delivered."""
        self.on_prompt_read: Callable[[Leg], None] = lambda leg: None
        """Called with the first output of every leg: its worker has the prompt's KV cache."""
        self.on_ledger: Callable[[Leg, pb.PhaseLedger], None] = lambda leg, ledger: None
        self.route: Mapping[str, Any] = {}
        self.choices = [Choice(index) for index in range(len(request.choice_seeds))]
        self.prefill: Leg | None = None
        self.prefill_ledger: pb.PhaseLedger | None = None
        self._phases: dict[Leg, Phase] = {}
        self._pace = pace or Pace()
        self._max_unread_tokens = max_unread_tokens
        self._events: deque[TokenDelta | TandemError] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._num_prompt_tokens = len(request.token_ids)
        self._prefill_over = asyncio.Event()

    # ------------------------------------------------------------------------------------- what workers say

    def take(self, choice: Choice, output: pb.TokenOutput) -> None:
        """Pass on those tokens that come next; the others were passed on before. Raises Diverged if they differ."""
        if choice.is_over:
            return
        token_ids = tuple(output.token_ids)
        first = output.position - self._num_prompt_tokens
        num_known = len(choice.tokens) - first
        if num_known != 0 and (first < 0 or not _continues(choice.tokens, first, token_ids)):
            raise Diverged(
                f"{output.request_id}: tokens {list(token_ids)} came for place {first} of the answer, which has "
                f"{len(choice.tokens)} tokens, {choice.tokens[max(0, first) :][: len(token_ids)]} there"
            )
        fresh = token_ids[num_known:]
        finish_reason = FINISH_REASONS.get(output.finish_reason)
        if fresh:
            choice.tokens.extend(fresh)
            if choice.lost_with:
                choice.lost_with.clear()
                choice.deaths.clear()
        if fresh or finish_reason:
            self._pass_on(choice, fresh, _logprobs_of(output, num_known), finish_reason)
        choice.is_over = choice.is_over or finish_reason is not None

    def _pass_on(
        self,
        choice: Choice,
        fresh: tuple[int, ...],
        logprobs: tuple[PositionLogprobs, ...],
        finish_reason: FinishReason | None,
    ) -> None:
        """Pass on one token at a time: a stop string may end the answer, and its count, at any of them."""
        for index in range(len(fresh) - 1):
            self._events.append(TokenDelta(choice.index, fresh[index : index + 1], logprobs[index : index + 1], None))
        self._put(TokenDelta(choice.index, fresh[-1:], logprobs[-1:], finish_reason))
        if len(self._events) > self._max_unread_tokens:
            self._give_up()

    def _put(self, event: TokenDelta | TandemError) -> None:
        self._events.append(event)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._pace.wake(waiting)

    def _give_up(self) -> None:
        """Nobody reads this, or too slowly: end it, behind what is there."""
        log.warning("client_too_slow", request_id=self.request.request_id, num_unread_tokens=len(self._events))
        self._put(
            Aborted(
                f"{len(self._events):,} tokens of this answer are waiting for its client, and no more than "
                f"{self._max_unread_tokens:,} may; read faster, ask for fewer tokens, or raise --max-unread-tokens"
            )
        )
        self._end()

    def output_came(self, leg: Leg, output: pb.TokenOutput) -> None:
        """Note what an output says of its worker."""
        if not leg.has_output:
            leg.has_output = True
            leg.prompt_read()
            self.on_prompt_read(leg)
        if output.HasField("ledger"):
            self._phases[leg] = Phase(output.ledger, leg is self.prefill, leg.reading)
            self.on_ledger(leg, output.ledger)

    def fail(self, error: TandemError) -> None:
        self._put(error)

    def expect_prefill(self, leg: Leg | None) -> None:
        """A prefill leg was started, after an earlier one perhaps; None: there is none (any more)."""
        self.prefill = leg
        self._prefill_over.clear()

    def prefill_ended(self, ledger: pb.PhaseLedger | None) -> None:
        if ledger is not None:
            self.prefill_ledger = ledger
        if self.prefill is not None:
            self.prefill.close(cancel=False)
        self._prefill_over.set()

    # ------------------------------------------------------------------------------------- what the client asks

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        async for batch in self.batches():
            for delta in batch:
                yield delta

    async def batches(self) -> AsyncIterator[Iterator[TokenDelta]]:
        seconds_left = self.request.deadline + GRACE_SECONDS - time.time()
        silence = asyncio.get_running_loop().call_later(max(0.0, seconds_left), self._time_is_up)
        try:
            while self._events or not all(choice.is_over for choice in self.choices):
                if not self._events:
                    self._waiting = asyncio.get_running_loop().create_future()
                    await self._waiting
                if self._events and isinstance(self._events[0], TandemError):
                    if all(choice.is_told for choice in self.choices):
                        break
                    raise self._events[0]
                yield self._unread()
            await self._wait_for_ledger()
            self.on_finished()
        finally:
            silence.cancel()
            await self.aclose()

    def _unread(self) -> Iterator[TokenDelta]:
        """Yield what has come, up to an error, and count it as delivered; nothing of a choice that was stopped."""
        while self._events and not isinstance(self._events[0], TandemError):
            delta = self._events.popleft()
            assert isinstance(delta, TokenDelta), "looked at just now"
            choice = self.choices[delta.choice_index]
            if not choice.is_stopped:
                choice.num_delivered += len(delta.token_ids)
                choice.is_told = delta.finish_reason is not None
                yield delta

    def _time_is_up(self) -> None:
        self.fail(DeadlineExceeded("the request's deadline passed before it was finished; ask for less"))

    def stop_choice(self, choice_index: int) -> None:
        """End a choice now; tokens that came after what was delivered are forgotten."""
        choice = self.choices[choice_index]
        choice.is_over = choice.is_stopped = choice.is_told = True
        if choice.leg is not None:
            choice.leg.close(cancel=True)

    async def aclose(self) -> None:
        """Cancel what still runs; idempotent."""
        self._end()

    def _end(self) -> None:
        for choice in self.choices:
            choice.is_over = True
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    @property
    def usage(self) -> Usage:
        ledger = self.prefill_ledger or self.choices[0].prompt_ledger or pb.PhaseLedger()
        num_prompt = len(self.request.token_ids)
        num_cached = min(ledger.num_cached_tokens, num_prompt)
        return Usage(
            num_prompt_tokens=num_prompt,
            num_computed_tokens=num_prompt - num_cached,
            num_cached_tokens=num_cached,
            num_completion_tokens=sum(choice.num_delivered for choice in self.choices),
            work=work_of(self._phases.values(), ledger, num_cached),
        )

    async def _wait_for_ledger(self) -> None:
        """Prefill's ledger comes with the first token; only a very short answer of decode's can overtake it."""
        if self.prefill is None or self.prefill_ledger is not None:
            return
        try:
            await asyncio.wait_for(self._prefill_over.wait(), _LEDGER_SECONDS)
        except TimeoutError:
            log.warning("prefill_ledger_missing", request_id=self.request.request_id)


class PrefillSink:
    """Hears of the prefill leg."""

    def __init__(self, flight: Flight, leg: Leg, on_failure: Callable[[TandemError], None]) -> None:
        self._flight = flight
        self._leg = leg
        self._on_failure = on_failure

    def accepted(self) -> None:
        self._leg.settle(None)

    def output(self, output: pb.TokenOutput) -> None:
        choice = self._flight.choices[output.choice_index]
        if not choice.tokens:  # else a decode worker was faster, which computed the prompt itself
            self._flight.take(choice, output)
        if output.token_ids:
            self._flight.output_came(self._leg, output)
        if output.HasField("ledger"):
            self._flight.prefill_ledger = output.ledger
            if output.choice_index == len(self._flight.choices) - 1:
                self._flight.prefill_ended(output.ledger)

    def ended(self, error: TandemError) -> None:
        is_first_word = self._leg.settle(error)
        self._flight.prefill_ended(None)
        if not is_first_word:
            self._on_failure(error)


class ChoiceSink:
    """Hears of one choice's decode leg."""

    def __init__(
        self,
        flight: Flight,
        choice: Choice,
        leg: Leg,
        on_failure: Callable[[Choice, Leg, TandemError], None],
    ) -> None:
        self._flight = flight
        self._choice = choice
        self._leg = leg
        self._on_failure = on_failure

    def accepted(self) -> None:
        self._leg.settle(None)

    def output(self, output: pb.TokenOutput) -> None:
        self._flight.take(self._choice, output)
        if output.token_ids:
            self._flight.output_came(self._leg, output)
        if output.HasField("ledger"):
            self._choice.ledger = output.ledger
            if self._leg.is_fresh:
                self._choice.prompt_ledger = output.ledger
            self._leg.close(cancel=False)

    def ended(self, error: TandemError) -> None:
        is_first_word = self._leg.settle(error)
        self._leg.close(cancel=False)
        if not is_first_word:
            self._on_failure(self._choice, self._leg, error)


def _continues(tokens: list[int], first: int, token_ids: tuple[int, ...]) -> bool:
    """Whether tokens from place `first` on repeat those that are there, and go on after the last."""
    known = tuple(tokens[first : first + len(token_ids)])
    return first <= len(tokens) and known == token_ids[: len(known)]


def _logprobs_of(output: pb.TokenOutput, num_known: int) -> tuple[PositionLogprobs, ...]:
    return tuple(_logprobs(position) for position in output.logprobs[num_known:]) if output.logprobs else ()


def _logprobs(position: pb.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_logprob(position.chosen), tuple(_logprob(other) for other in position.top))


def _logprob(logprob: pb.TokenLogprob) -> Logprob:
    return Logprob(logprob.token_id, logprob.logprob, logprob.rank)

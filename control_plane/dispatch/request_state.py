"""Owns the mutable state of one request, over all attempts and all workers.

Every other class of this folder reads the state and changes it through the methods here. Sections below, in the order
that a request meets them: attempts, calls to workers, tokens, failure and end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from control_plane.admission.prices import PredictedWork
from control_plane.dispatch.admission import RetryBudget
from control_plane.dispatch.block_hashes import PromptHashes
from control_plane.dispatch.doubts import ASK_NEXT, Doubts
from control_plane.dispatch.prompt_forms import PromptForms
from control_plane.dispatch.wakeups import EventQueue, WakeupScheduler
from control_plane.dispatch.worker_call import Phase, WorkerCall, usage_of
from control_plane.explain.prompt_blocks import PromptBlocks
from control_plane.fleet.registry import Worker
from control_plane.generation import FinishReason, Logprob, PositionLogprobs, TokenDelta, TokenRequest, Usage
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import (
    Aborted,
    Draining,
    InternalError,
    Overloaded,
    TandemError,
)
from tandem_runtime.log import get_logger
from tandem_runtime.virtual_counters import AnswerMeter

log = get_logger(__name__)

MAX_ATTEMPTS = 4
GRACE_SECONDS = 1.0
"""Workers end a request at its deadline themselves. The gateway waits this much longer for workers that cannot."""
MAX_UNREAD_TOKENS = 8192
"""Tokens of one request that may wait for a client that reads slower than its answer is generated."""
_CHARGED_AT_ONCE = 16
"""Tokens of a choice. To charge each by itself is a fifth of the time from a step's message to its unread tokens."""

_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Diverged(InternalError):
    """A worker's tokens contradict the tokens that the client has; the choice continues from the client's tokens."""


class RequestObserver(Protocol):
    """The only calls from a request up to the dispatcher."""

    def call_failed(self, state: RequestState, call: WorkerCall, error: TandemError) -> None:
        """A worker was lost, or failed the request, after it had accepted the request."""

    def finished(self, state: RequestState) -> None:
        """The client has every token."""

    def closed(self, state: RequestState) -> None:
        """The request has ended, finished or not; called once."""


@dataclass(eq=False)
class ChoiceState:
    """One generated run of tokens, over all workers that generate it. Written by RequestState only."""

    index: int
    tokens: list[int] = field(default_factory=list)
    call: WorkerCall | None = None
    """The latest call to a decode worker."""
    num_charged: int = 0
    """Tokens that its account was charged for, or need not be."""
    num_delivered: int = 0
    is_over: bool = False
    """Finished or stopped: later outputs are dropped."""
    is_stopped: bool = False
    is_end_delivered: bool = False
    """The client has the end, or wants no more: later errors are dropped."""
    num_losses: int = 0
    """Decode workers that the choice was lost with; draining workers do not count."""
    lost_with: set[str] = field(default_factory=set)
    """Incarnations that the choice was lost with since its last new token."""
    deaths: set[str] = field(default_factory=set)
    """Incarnations that died with the choice since its last new token."""
    ledger: pb.PhaseLedger | None = None
    prompt_ledger: pb.PhaseLedger | None = None
    """Of the decode call that computed or pulled the prompt. A call that continues an answer has another text."""


class RequestState:
    """Everything that is known of one request; on one event loop."""

    def __init__(
        self,
        request: TokenRequest,
        card: pb.ModelCard,
        hashes: PromptHashes | None,
        observer: RequestObserver,
        *,
        traceparent: str = "",
        wakeups: WakeupScheduler | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
    ) -> None:
        """`hashes`: None if no cache may hold the prompt. `wakeups` is shared by all requests of the event loop."""
        self.request = request
        self.card = card
        self.hashes = hashes
        self.forms = PromptForms(request, hashes)
        """The prompt, as each kind of worker receives it."""
        self.traceparent = traceparent
        self.choices = tuple(ChoiceState(index) for index in range(len(request.choice_seeds)))
        self.history = request.history
        """What the dispatcher has done, for the request's explanation."""
        self.history.choices = self.choices
        self.history.session = request.session_affinity
        if hashes is not None:
            self.history.prompt_blocks = PromptBlocks.of(hashes.blocks.packed, hashes.grain)
        self.unread = EventQueue(wakeups or WakeupScheduler())
        """Tokens and errors that the client has not read."""
        self._observer = observer
        self._num_prompt_tokens = len(request.token_ids)
        self._max_unread_tokens = max_unread_tokens
        # attempts
        self._attempt = 0
        self._first_attempt_of_round = 0
        self._refusal: Overloaded | None = None
        self._mismatch: TandemError | None = None
        self._avoid: set[str] = set()
        self._num_avoided = 0
        self.predicted = PredictedWork()
        """Of the attempt: workers charge the account for it."""
        self._meter: AnswerMeter | None = None
        """Charges the account for the answer's tokens as they come; None: the request has not started."""
        self.doubts = Doubts()
        """Final errors of workers, each believed or not."""
        self._num_stalls = 0
        self._num_resends = 0
        self._needs_permit = False
        self._has_restarted = False
        self._has_started = asyncio.Event()
        # calls
        self._route: Mapping[str, Any] = {}
        self._handle: pb.KvHandle | None = None
        self._writer: Worker | None = None
        self._prefill: WorkerCall | None = None
        self._prefill_ledger: pb.PhaseLedger | None = None
        self._prefill_over = asyncio.Event()
        self._phases: dict[WorkerCall, Phase] = {}
        self._prompt_places: set[tuple[str, str]] = set()
        # end
        self._num_unfinished_tokens = 0
        self._num_reports_due = 0
        self._has_all_reports = asyncio.Event()
        self._recoveries: list[asyncio.Task[None]] = []
        self._is_closed = False

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the request's deadline; below 0 once it has passed."""
        return self.request.deadline - time.monotonic()

    # ------------------------------------------------------------------------------------------------- attempts

    @property
    def attempt(self) -> int:
        """Counts every try, so that a late message of one try is never taken for another's."""
        return self._attempt

    @property
    def is_last_attempt(self) -> bool:
        """Of this round; a round ends when every worker has refused."""
        return self._attempt - self._first_attempt_of_round + 1 >= MAX_ATTEMPTS

    @property
    def avoid(self) -> Collection[str]:
        """Incarnations that refused or failed in this round."""
        return self._avoid

    @property
    def refusal(self) -> Overloaded | None:
        """The answer of this round's first full worker: the client's answer if all are full."""
        return self._refusal

    @property
    def has_restarted(self) -> bool:
        """Whether the request has moved to another prefill worker; it does so once."""
        return self._has_restarted

    @property
    def mismatch(self) -> TandemError | None:
        """The answer of this round's first worker that serves another version of the model."""
        return self._mismatch

    def next_attempt(self) -> None:
        self._attempt += 1

    def begin_round(self) -> None:
        """Try every worker anew: a worker that refused may have room now."""
        self._has_started.clear()
        self._avoid.clear()
        self._num_avoided = 0
        self._refusal = self._mismatch = None
        self._attempt += 1
        self._first_attempt_of_round = self._attempt

    def restart(self, lost: str) -> None:
        """Begin a round after incarnation `lost` of a prefill worker was lost."""
        self.begin_round()
        self._avoid.add(lost)
        self._has_restarted = True
        self._needs_permit = True

    def take_permit(self, budget: RetryBudget) -> None:
        """Spend a retry permit if a worker was lost, rather than full; raises Overloaded while there is none."""
        if self._needs_permit:
            budget.take(is_first=self._num_resends == 0)
            self._num_resends += 1
            self._needs_permit = False

    def route_chosen(self, route: Mapping[str, Any], handle: pb.KvHandle | None, writer: Worker | None = None) -> None:
        """`handle`: None if decode computes the prompt. `writer`: the prefill worker that writes its blocks."""
        self._route = route
        self._handle = handle
        self._writer = None if handle is None else writer

    def refused(self, error: TandemError) -> None:
        """Remember the first full worker's answer, and that of the first one with another version."""
        if isinstance(error, Overloaded) and not isinstance(error, Draining):
            self._refusal = self._refusal or error
        elif isinstance(error, ASK_NEXT):
            self._mismatch = self._mismatch or error

    def attempt_failed(self, error: TandemError) -> None:
        """Remember why both halves could not be started."""
        self.refused(error)
        self._needs_permit = not isinstance(error, (Overloaded, *ASK_NEXT))
        if isinstance(error, ASK_NEXT) and len(self._avoid) > self._num_avoided:
            self._first_attempt_of_round += 1  # it is no attempt: every worker may be asked once
            self._num_avoided = len(self._avoid)

    def avoid_worker(self, incarnation: str) -> None:
        self._avoid.add(incarnation)

    def avoid_only(self, incarnations: Collection[str]) -> None:
        self._avoid = set(incarnations)

    def predict(self, work: PredictedWork) -> None:
        """The halves of an attempt are about to be sent: workers hear of their work."""
        self.predicted = work

    def charge_to(self, meter: AnswerMeter) -> None:
        """Charge the tokens that come from now on to an account."""
        self.settle()
        self._meter = meter

    def settle(self) -> None:
        """No more tokens come: charge what is not charged yet, give back what was charged in advance."""
        for choice in self.choices:
            self._charge(choice)
        if self._meter is not None:
            self._meter.ended()

    def _charge(self, choice: ChoiceState) -> None:
        num_tokens, choice.num_charged = len(choice.tokens) - choice.num_charged, len(choice.tokens)
        if self._meter is not None and num_tokens:
            self._meter.answered(num_tokens)

    def started(self) -> None:
        """Both halves were accepted. A worker that refused may still take a choice that moves later."""
        self._avoid.clear()
        self.doubts.refuted()
        self.history.accepted()
        self._has_started.set()

    async def wait_started(self) -> None:
        """Return once both halves were accepted. Until then a failure is retried as a whole."""
        await self._has_started.wait()

    def hashes_with(self, answer: Sequence[int]) -> Sequence[bytes]:
        """Return the block hashes of the prompt and an answer that has begun."""
        if self.hashes is None or not answer:
            return ()
        return self.hashes.with_answer(self.request.token_ids, answer)

    def hashes_after_prompt(self, answer: Sequence[int]) -> Sequence[bytes]:
        """Return the hashes of the blocks that an answer fills after the prompt's full blocks; the prompt is not read.

        A request may have 128 choices of a prompt of 100,000 blocks.
        """
        if self.hashes is None or not answer:
            return ()
        return self.hashes.after_prompt(self.request.token_ids, answer)

    # ---------------------------------------------------------------------------------------------------- calls

    @property
    def route(self) -> Mapping[str, Any]:
        """The description of the latest route, for headers and traces."""
        return self._route

    @property
    def handle(self) -> pb.KvHandle | None:
        return self._handle

    @property
    def writer(self) -> Worker | None:
        """The prefill worker that writes the blocks of `handle`."""
        return self._writer

    @property
    def prefill(self) -> WorkerCall | None:
        """The call that computes the prompt at a prefill worker."""
        return self._prefill

    @property
    def prefill_ledger(self) -> pb.PhaseLedger | None:
        return self._prefill_ledger

    def call_started(self, call: WorkerCall) -> None:
        """Take in a call that replaces the earlier one of its choice, or of prefill."""
        self.history.called(call)
        if call.choice_index is None:
            self._prefill = call
            self._prefill_over.clear()
        else:
            self.choices[call.choice_index].call = call

    def cancel_calls(self) -> bool:
        """Cancel every open call; return whether one was open.

        If the request ends with this, before its client has a token, the workers report what they had computed.
        """
        calls = [call for call in (*(choice.call for choice in self.choices), self._prefill) if call is not None]
        was_open = any(call.is_open for call in calls)
        wants_report = self._is_closed and not self.has_delivered
        for call in calls:
            if wants_report and call.is_open:
                self._num_reports_due += 1
                call.close(cancel=True, on_report=self._report_came)
            else:
                call.close(cancel=True)
        self._prefill = None
        self._prefill_over.clear()
        return was_open

    def prompt_came(self, seconds: float) -> None:
        """Decode workers that wait for the prompt's cache may begin; they need about `seconds` to the first token."""
        for choice in self.choices:
            if choice.call is not None and choice.call.watch is not None:
                choice.call.watch.begin(seconds)

    def prompt_came_to(self, incarnation: str, host_id: str) -> bool:
        """Note a pool and a host's store that have the prompt's cache now; False if that was noted before."""
        place = incarnation, host_id
        is_new = place not in self._prompt_places
        self._prompt_places.add(place)
        return is_new

    def phase_ended(self, call: WorkerCall, ledger: pb.PhaseLedger) -> None:
        self._phases[call] = Phase(ledger, call is self._prefill, call.estimate)
        call.ledger = ledger

    def choice_ledger_received(self, choice: ChoiceState, ledger: pb.PhaseLedger, *, is_fresh: bool) -> None:
        """`is_fresh`: the ledger's call began with the prompt alone."""
        choice.ledger = ledger
        if is_fresh:
            choice.prompt_ledger = ledger

    def prefill_ledger_received(self, ledger: pb.PhaseLedger) -> None:
        self._prefill_ledger = ledger

    def prefill_ended(self) -> None:
        if self._prefill is not None:
            self._prefill.close(cancel=False)
        self._prefill_over.set()

    async def wait_prefill_ended(self) -> None:
        """Return once prefill's ledger has come or cannot come any more."""
        await self._prefill_over.wait()

    @property
    def has_delivered(self) -> bool:
        """Whether the client has a token."""
        return any(choice.num_delivered for choice in self.choices)

    def worked(self, ledger: pb.PhaseLedger) -> None:
        """Take in what a worker had done for a call that it does not finish."""
        self._num_unfinished_tokens = max(self._num_unfinished_tokens, ledger.num_computed_tokens)

    def _report_came(self, ledger: pb.PhaseLedger | None) -> None:
        if ledger is not None:
            self.worked(ledger)
        self._num_reports_due -= 1
        self._check_reports()

    def _check_reports(self) -> None:
        if self._is_closed and self._num_reports_due == 0:
            self._has_all_reports.set()

    async def num_unfinished_tokens(self) -> int:
        """Return how many tokens of the prompt were computed for a request that ends before its first token.

        Waits for the request's end, and then for the workers' reports, some seconds at most. Tokens that two workers
        computed count once.
        """
        await self._has_all_reports.wait()
        finished = [self._prefill_ledger, *(choice.prompt_ledger for choice in self.choices)]
        computed = [ledger.num_computed_tokens for ledger in finished if ledger is not None]
        return min(self._num_prompt_tokens, max([self._num_unfinished_tokens, *computed]))

    @property
    def usage(self) -> Usage:
        """Return what the phases did; final once all tokens were delivered."""
        return usage_of(
            self._phases.values(),
            self._prefill_ledger or self.choices[0].prompt_ledger or pb.PhaseLedger(),
            self._num_prompt_tokens,
            sum(choice.num_delivered for choice in self.choices),
            len(self.history.seams),
        )

    # --------------------------------------------------------------------------------------------------- tokens

    def receive(self, choice: ChoiceState, output: pb.TokenOutput) -> None:
        """Queue the tokens of an output that are new; merge by absolute position.

        Prefill's first token, decode's stream (which repeats that token) and the stream of a worker that continues
        the choice may overlap in any order; each token is queued once. Raises Diverged if they contradict each other
        or leave a gap.
        """
        if choice.is_over:
            return
        token_ids = tuple(output.token_ids)
        first = output.position - self._num_prompt_tokens
        num_known = len(choice.tokens) - first
        if num_known != 0 and (first < 0 or not _continues(choice.tokens, first, token_ids)):
            raise Diverged(  # without the tokens, which are the client's answer: logs have this message
                f"{output.request_id}: {len(token_ids)} tokens came for position {first} of the answer, which has "
                f"{len(choice.tokens)} tokens; they leave a gap, or differ from the tokens there"
            )
        fresh = token_ids[num_known:]
        finish_reason = _FINISH_REASONS.get(output.finish_reason)
        if fresh:
            choice.tokens.extend(fresh)
            if len(choice.tokens) - choice.num_charged >= _CHARGED_AT_ONCE:
                self._charge(choice)
            if choice.lost_with:
                choice.lost_with.clear()
                choice.deaths.clear()
        if fresh or finish_reason:
            self._queue(choice, fresh, _logprobs_of(output, num_known), finish_reason)
        choice.is_over = choice.is_over or finish_reason is not None

    def _queue(
        self,
        choice: ChoiceState,
        fresh: tuple[int, ...],
        logprobs: tuple[PositionLogprobs, ...],
        finish_reason: FinishReason | None,
    ) -> None:
        """Queue one token at a time: a stop string may end the answer, and its count, at any of them."""
        unread = self.unread
        for index in range(len(fresh) - 1):
            unread.append(TokenDelta(choice.index, fresh[index : index + 1], logprobs[index : index + 1], None))
        unread.put(TokenDelta(choice.index, fresh[-1:], logprobs[-1:], finish_reason))
        if len(unread) > self._max_unread_tokens:
            self._abort_unread()

    def _abort_unread(self) -> None:
        """End the request: its client reads too slowly. The error follows the tokens that wait already."""
        log.warning("client_too_slow", request_id=self.request.request_id, num_unread_tokens=len(self.unread))
        self.fail(
            Aborted(
                f"{len(self.unread):,} tokens of this answer are waiting for its client, and no more than "
                f"{self._max_unread_tokens:,} may; read faster, ask for fewer tokens, or raise --max-unread-tokens"
            )
        )
        self.close()

    def delivered(self, delta: TokenDelta) -> bool:
        """Count tokens as delivered; return False for tokens of a stopped choice, which are dropped."""
        choice = self.choices[delta.choice_index]
        if choice.is_stopped:
            return False
        choice.num_delivered += len(delta.token_ids)
        choice.is_end_delivered = delta.finish_reason is not None
        return True

    def stop_choice(self, choice_index: int) -> None:
        """End a choice now; forget its tokens that were not delivered."""
        choice = self.choices[choice_index]
        choice.is_over = choice.is_stopped = choice.is_end_delivered = True
        if choice.call is not None:
            choice.call.close(cancel=True)

    # ------------------------------------------------------------------------------------------ failure and end

    def call_failed(self, call: WorkerCall, error: TandemError) -> None:
        """Have a call recovered that was lost after the worker had accepted."""
        self._observer.call_failed(self, call, error)

    def choice_lost(self, choice: ChoiceState, incarnation: str) -> None:
        """A decode worker was lost with a choice: neither the choice nor the request goes back there first."""
        self._avoid.add(incarnation)
        choice.lost_with.add(incarnation)

    def count_loss(self, choice: ChoiceState) -> int:
        """Return how many decode workers the choice was lost with, this one included."""
        choice.num_losses += 1
        return choice.num_losses

    def count_stall(self) -> int:
        """Return how often the request waited for a worker that brought nothing, this time included."""
        self._num_stalls += 1
        return self._num_stalls

    def count_death(self, choice: ChoiceState, incarnation: str) -> int:
        """Return how many workers died with the choice since its last new token, this one included."""
        choice.deaths.add(incarnation)
        return len(choice.deaths)

    def fail(self, error: TandemError) -> None:
        """Give the client an error, after the tokens that wait already."""
        self.unread.put(error)

    def recovery_started(self, task: asyncio.Task[None]) -> None:
        """Take in a task that is cancelled when the request ends."""
        self._recoveries.append(task)

    def finish(self) -> None:
        """The client has every token."""
        self.doubts.refuted(is_finished=True)
        self._observer.finished(self)

    def close(self) -> None:
        """End the request and all that runs for it; idempotent."""
        for choice in self.choices:
            choice.is_over = True
        if not self._is_closed:
            self._is_closed = True
            for task in self._recoveries:
                task.cancel()
            self._observer.closed(self)
            self._check_reports()


def _continues(tokens: list[int], first: int, token_ids: tuple[int, ...]) -> bool:
    """Return whether tokens from position `first` on repeat the known ones and leave no gap."""
    known = tuple(tokens[first : first + len(token_ids)])
    return first <= len(tokens) and known == token_ids[: len(known)]


def _logprobs_of(output: pb.TokenOutput, num_known: int) -> tuple[PositionLogprobs, ...]:
    return tuple(_logprobs(position) for position in output.logprobs[num_known:]) if output.logprobs else ()


def _logprobs(position: pb.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(_logprob(position.chosen), tuple(_logprob(other) for other in position.top))


def _logprob(logprob: pb.TokenLogprob) -> Logprob:
    return Logprob(logprob.token_id, logprob.logprob, logprob.rank)

"""Holds one call to a worker, from its Submit to its end, and sums the ledgers of a request's calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from control_plane.admission.attachment import GrantLeft
from control_plane.admission.worker_rooms import SentCall
from control_plane.fleet.call_watch import CallWatch
from control_plane.fleet.worker_links import Report, WorkerLink
from control_plane.generation import PhaseWork, Usage
from control_plane.routing.cost_model import InFlightEntry, PrefillEstimate
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled, Overloaded, TandemError


def _new_answer() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class WorkerCall:
    """One Submit at one worker. Gives its in-flight tokens back exactly once."""

    link: WorkerLink
    submit: pb.Submit
    """Without the prompt's token ids and block hashes."""
    entry: InFlightEntry
    choice_index: int | None = None
    """The choice that the call generates. None: the call computes the prompt at a prefill worker."""
    estimate: PrefillEstimate | None = None
    """What the router expected of the caches, if this worker computes the prompt."""
    room: SentCall | None = None
    """What the call takes of the worker's room, by the gateway's estimate."""
    on_room: Callable[[], None] = lambda: None
    """Called when the worker may have more room than before."""
    watch: CallWatch | None = None
    """Records what the call shows of its worker's health; None: it does not count."""
    answered: asyncio.Future[None] = field(default_factory=_new_answer)
    """Done once the worker has accepted the request; an error if the worker refused."""
    is_open: bool = True
    is_refused: bool = False
    has_output: bool = False
    sent_at: float = field(default_factory=time.perf_counter)
    """By `time.perf_counter`, as the two times below; for explanations."""
    accepted_at: float | None = None
    output_at: float | None = None
    """When the first output came; None: none has come."""
    closed_at: float | None = None
    ledger: pb.PhaseLedger | None = None
    """What the worker reports of the call once it has ended."""

    @property
    def worker_id(self) -> str:
        return self.link.worker.worker_id

    @property
    def grant(self) -> GrantLeft | None:
        """What the worker's grant left before this call; None: its room was estimated."""
        return self.room.grant if self.room is not None else None

    @property
    def is_prefill(self) -> bool:
        return self.choice_index is None

    @property
    def incarnation(self) -> str:
        return self.link.worker.incarnation

    @property
    def is_fresh(self) -> bool:
        """Whether the call began with the prompt alone, and not in the middle of an answer."""
        return not self.submit.token_ids

    def follow(self, watch: CallWatch) -> None:
        """Let the call count for its worker's health."""
        self.watch = watch

    def answer(self, error: TandemError | None) -> bool:
        """Complete `answered`; return False if it was completed before."""
        if self.answered.done():
            return False
        self.is_refused = error is not None
        if self.room is not None:
            if error is None:
                self.room.accepted()
            elif isinstance(error, Overloaded):
                self.room.refused()
        if error is None:
            self.accepted_at = time.perf_counter()
            if self.watch is not None:
                self.watch.accepted()
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)
            self.answered.exception()  # marks it as retrieved: the waiting task may have left
        return True

    def output_began(self) -> None:
        """Note the first output: a decode worker has the prompt's KV cache now."""
        self.has_output = True
        self.output_at = time.perf_counter()
        if self.watch is not None:
            self.watch.output()
        if self.choice_index is not None:
            self.entry.prompt_read()
            self.on_room()

    def close(self, *, cancel: bool, on_report: Report | None = None) -> None:
        """Stop listening to the worker, and cancel the request there; idempotent.

        `on_report` is called once with what the worker had done for a call that is cancelled here.
        """
        if not self.is_open:
            if on_report is not None:
                on_report(None)
            return
        self.is_open = False
        self.closed_at = time.perf_counter()
        self.entry.remove()
        if self.room is not None:
            self.room.ended()
        if self.watch is not None:
            self.watch.closed()
        if cancel:
            self.answer(Cancelled("the request ended before its worker had answered"))
            self.link.cancel(self.submit.request_id, self.submit.attempt, on_report)
        else:
            self.link.forget(self.submit.request_id, self.submit.attempt)
        if not self.is_refused:
            self.on_room()


@dataclass(frozen=True, eq=False)
class Phase:
    """The ledger of one call to a worker."""

    ledger: pb.PhaseLedger
    is_prefill: bool
    estimate: PrefillEstimate | None
    """What the router expected of the caches, if this call was to compute the prompt."""


def usage_of(
    phases: Iterable[Phase],
    prompt: pb.PhaseLedger,
    num_prompt_tokens: int,
    num_completion_tokens: int,
    num_seams: int = 0,
) -> Usage:
    """Return a request's usage; `prompt` is the ledger of the call that computed the prompt."""
    num_cached_tokens = min(prompt.num_cached_tokens, num_prompt_tokens)
    return Usage(
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens - num_cached_tokens,
        num_cached_tokens=num_cached_tokens,
        num_completion_tokens=num_completion_tokens,
        work=work_of(phases, prompt, num_cached_tokens),
        num_seams=num_seams,
    )


def work_of(phases: Iterable[Phase], prompt: pb.PhaseLedger, num_cached_tokens: int) -> PhaseWork:
    """Sum what the phases did. `prompt` is the ledger of the call that computed the prompt.

    Seconds are those between a call's first and last step; other requests of the same batches share them.
    """
    phases = sorted(phases, key=lambda phase: not phase.is_prefill)  # a prefill worker's estimate comes first
    estimate = next((phase.estimate for phase in phases if phase.estimate is not None), None)
    num_loaded = min(prompt.num_loaded_tokens, num_cached_tokens)
    # The host's store had the tokens that the index expected there; only the rest was fetched from another host.
    num_remote = 0 if estimate is None else max(0, min(num_loaded - estimate.cached.host, estimate.cached.remote))
    return PhaseWork(
        num_store_tokens=num_loaded - num_remote,
        num_remote_tokens=num_remote,
        num_reprefill_tokens=sum(phase.ledger.num_reprefill_tokens for phase in phases),
        num_bytes_moved=sum(phase.ledger.num_bytes_pulled for phase in phases),
        prefill_us=sum(_prefill_us(phase) for phase in phases),
        decode_us=sum(_decode_us(phase) for phase in phases),
    )


def _prefill_us(phase: Phase) -> int:
    """All of a prefill worker's time; a decode worker's until its first token, if it computed the prompt."""
    ledger = phase.ledger
    if phase.is_prefill:
        return _between_us(ledger.scheduled_ns, ledger.finished_ns or ledger.first_token_ns)
    return _between_us(ledger.scheduled_ns, ledger.first_token_ns) if ledger.num_computed_tokens else 0


def _decode_us(phase: Phase) -> int:
    ledger = phase.ledger
    if phase.is_prefill:
        return 0
    return _between_us(ledger.first_token_ns if ledger.num_computed_tokens else ledger.scheduled_ns, ledger.finished_ns)


def _between_us(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) // 1000 if start_ns and end_ns else 0

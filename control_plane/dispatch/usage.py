"""What did a request's phases do, summed over all workers that it was at?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from control_plane.generation import PhaseWork
from control_plane.routing.estimates import Reading
from tandem.v1 import types_pb2 as pb


@dataclass(frozen=True, eq=False)
class Phase:
    """One leg's ledger."""

    ledger: pb.PhaseLedger
    is_prefill: bool
    reading: Reading | None
    """What the router expected of the caches, if this leg was to read the prompt."""


def work_of(phases: Iterable[Phase], prompt: pb.PhaseLedger, num_cached_tokens: int) -> PhaseWork:
    """Sum what the phases did; `prompt` is the ledger of the one that read the prompt and found so many tokens cached.

    Seconds are those between a leg's first and last step: others share a batch's time.
    """
    phases = sorted(phases, key=lambda phase: not phase.is_prefill)  # a prefill worker read it if there was one
    reading = next((phase.reading for phase in phases if phase.reading is not None), None)
    num_loaded = min(prompt.num_loaded_tokens, num_cached_tokens)
    # What its host's store was known to have came from there, and only the rest was fetched.
    num_remote = 0 if reading is None else max(0, min(num_loaded - reading.cached.host, reading.cached.remote))
    return PhaseWork(
        num_store_tokens=num_loaded - num_remote,
        num_remote_tokens=num_remote,
        num_reprefill_tokens=sum(phase.ledger.num_reprefill_tokens for phase in phases),
        num_bytes_moved=sum(phase.ledger.num_bytes_pulled for phase in phases),
        prefill_us=sum(_prefill_us(phase) for phase in phases),
        decode_us=sum(_decode_us(phase) for phase in phases),
    )


def _prefill_us(phase: Phase) -> int:
    """A prefill worker's time is all prefill; a decode worker's until its first token, if it read the prompt."""
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

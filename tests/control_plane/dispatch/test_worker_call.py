"""The sums over a request's phases agree with its workers' ledgers."""

from __future__ import annotations

from control_plane.dispatch.worker_call import Phase, work_of
from control_plane.generation import PhaseWork, Usage
from control_plane.routing.cost_model import PrefillEstimate
from control_plane.routing.prefix_index import CachedPrefix
from tandem.v1 import types_pb2 as pb

MS = 1_000_000


def ledger(scheduled: int, first_token: int, finished: int, **fields: int) -> pb.PhaseLedger:
    """Times in milliseconds."""
    times = {"scheduled_ns": scheduled * MS, "first_token_ns": first_token * MS, "finished_ns": finished * MS}
    return pb.PhaseLedger(**times, **fields)  # type: ignore[arg-type]


def estimate(host: int, remote: int) -> PrefillEstimate:
    return PrefillEstimate(None, CachedPrefix(16, host, remote, "h"), 0, 0.0, 0.0, 0.0)  # type: ignore[arg-type]


def test_a_handed_over_request_has_its_seconds_at_both_workers() -> None:
    prefill = ledger(10, 30, 30, num_computed_tokens=100)
    decode = ledger(31, 35, 90, num_bytes_pulled=4096)
    phases = [Phase(decode, False, None), Phase(prefill, True, estimate(0, 0))]
    assert work_of(phases, prefill, 0) == PhaseWork(num_bytes_moved=4096, prefill_us=20_000, decode_us=59_000)


def test_a_decode_worker_that_reads_the_prompt_does_both() -> None:
    both = ledger(10, 30, 90, num_computed_tokens=100)
    assert work_of([Phase(both, False, estimate(0, 0))], both, 0) == PhaseWork(prefill_us=20_000, decode_us=60_000)


def test_an_answer_that_moved_has_the_seconds_of_those_that_told() -> None:
    prefill = ledger(10, 30, 30, num_computed_tokens=100)
    moved = ledger(100, 120, 150, num_computed_tokens=110, num_reprefill_tokens=3)
    work = work_of([Phase(prefill, True, None), Phase(moved, False, None)], prefill, 0)
    assert work == PhaseWork(num_reprefill_tokens=3, prefill_us=40_000, decode_us=30_000)


def test_cached_tokens_are_told_apart_by_where_they_were() -> None:
    prompt = ledger(1, 2, 3, num_cached_tokens=96, num_loaded_tokens=80)
    for expected, split in (
        (estimate(80, 0), (16, 80, 0)),
        (estimate(48, 32), (16, 48, 32)),
        (estimate(48, 16), (16, 64, 16)),  # more tokens than the fetch was expected to bring: the store had them
        (estimate(96, 16), (16, 80, 0)),
        (None, (16, 80, 0)),
    ):
        usage = Usage(100, 4, 96, 1, work_of([Phase(prompt, True, expected)], prompt, 96))
        assert (usage.num_pool_tokens, usage.work.num_store_tokens, usage.work.num_remote_tokens) == split


def test_workers_that_told_nothing_did_nothing_we_know_of() -> None:
    assert work_of([], pb.PhaseLedger(), 0) == PhaseWork()

"""Fleets and requests whose times can be followed with a pencil."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from control_plane.simulator.engine import Engine, Job
from control_plane.simulator.pool import Store
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.traces import TraceRequest

BLOCK = 16
PLAIN = WorkerProfile(
    step_ms=10.0,
    answer_ms=1.0,
    context_ms=0.0,
    prompt_ms=1.0,
    prompt_context_ms=0.0,
    kv_tokens=10_000,
    bytes_per_token=1000,
    chunk_tokens=100,
    chunk_tokens_with_answers=50,
    max_num_seqs=4,
    max_num_waiting=4,
)


def fleet(num_prefill: int = 1, num_decode: int = 1, worker: WorkerProfile = PLAIN, **changes: Any) -> FleetProfile:
    plain = FleetProfile(
        num_prefill,
        num_decode,
        worker,
        worker,
        gateway_seconds=0.0,
        return_seconds=0.0,
        hand_over_seconds=0.0,
        local_bytes_per_second=1e15,
        link_bytes_per_second=1e15,
        link_seconds=0.0,
    )
    return replace(plain, **changes)


def request(number: int = 0, prompt: int = 100, answer: int = 10, arrival: float = 0.0, **more: Any) -> TraceRequest:
    """A request with blocks of its own, unless `hash_ids` says otherwise."""
    ids = tuple(1000 * (number + 1) + place for place in range(prompt // BLOCK))
    return TraceRequest(number, arrival, prompt, answer, **{"hash_ids": ids, "block_tokens": BLOCK, **more})


class Bench:
    """One engine, moved by hand; `prompts` and `ends` hold what was done, with its time in milliseconds."""

    def __init__(self, worker: WorkerProfile = PLAIN, store: Store | None = None) -> None:
        self.prompts: list[tuple[int, float]] = []
        self.ends: list[tuple[int, float]] = []
        self.engine = Engine(
            0,
            worker,
            fleet(worker=worker, store_tokens=1_000_000),
            BLOCK,
            store,
            lambda engine, job, now: self.prompts.append((job.request.number, round(1000 * now, 3))),
            lambda engine, job, now: self.ends.append((job.request.number, round(1000 * now, 3))),
        )

    def prompt(self, asked: TraceRequest, now: float = 0.0, *, decodes: bool = True) -> Job:
        job = Job(asked, computes_prompt=True, decodes=decodes)
        assert self.engine.submit_prompt(job, now)
        return job

    def run(self) -> None:
        while (moment := self.engine.next_change()) is not None:
            self.engine.change(moment)

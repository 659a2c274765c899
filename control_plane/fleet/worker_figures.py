"""The numbers of a worker's report that routing needs: read from the messages once, not for each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tandem.v1 import types_pb2 as pb


class Link(NamedTuple):
    """What one KV service has measured of its fetches from another."""

    latency_ms: float
    bytes_per_second: float


class WorkerFigures(NamedTuple):
    """Of one worker as of its last report. None: not known yet."""

    host_id: str
    model_id: str
    kv_address: str
    numerics_class: str
    context_length: int
    max_running: int | None
    """Requests that the worker runs at once, as it says in its settings."""
    pool_tokens: int
    """Of its KV pool; 0 if the pool is not reported yet."""
    tokens_per_block: int
    bytes_per_block: int
    free_tokens: int
    """Free, or cached and in no request's use."""
    has_free_blocks: bool
    num_tokens_in_flight: int
    num_running: int
    num_waiting: int
    step_ms: float | None
    """The mean duration of a step over the worker's life."""
    prompt_rate: float | None
    """Prompt tokens computed per second of steps: a rate of workers whose steps only compute prompts."""
    answer_rate: float | None
    """Tokens sampled per second of steps."""
    has_store: bool
    """Of a KV service: whether it has a block store."""
    links: Mapping[str, Link]
    """Of a KV service: to the KV services it has fetched from, by address."""


def figures_of(info: pb.WorkerInfo, load: pb.LoadReport) -> WorkerFigures:
    """Read a worker's description and report."""
    pool, counters, most = load.kv, load.counters, info.settings.get("max_num_seqs", "")
    num_free, tokens_per_block = pool.num_free_blocks + pool.num_cached_blocks, pool.tokens_per_block
    seconds, num_steps = counters.get("step_seconds", 0.0), counters.get("steps", 0.0)
    return WorkerFigures(
        host_id=info.host_id,
        model_id=info.card.model_id,
        kv_address=info.kv_address,
        numerics_class=info.card.fingerprint.numerics_class,
        context_length=info.card.context_length,
        max_running=int(most) if most.isdecimal() and most.isascii() else None,
        pool_tokens=pool.num_total_blocks * tokens_per_block,
        tokens_per_block=tokens_per_block,
        bytes_per_block=pool.bytes_per_block,
        free_tokens=num_free * max(1, tokens_per_block),
        has_free_blocks=num_free > 0,
        num_tokens_in_flight=load.num_tokens_in_flight,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        step_ms=1000.0 * seconds / num_steps if num_steps > 0 else None,
        prompt_rate=_rate(counters.get("prompt_tokens_computed", 0.0), seconds),
        answer_rate=_rate(counters.get("tokens_generated", 0.0), seconds),
        has_store=load.kv_service.HasField("store"),
        links={
            link.address: Link(link.latency_ms, link.bytes_per_second)
            for link in load.kv_service.links
            if link.bytes_per_second > 0
        },
    )


def _rate(number: float, seconds: float) -> float | None:
    return number / seconds if number > 0 and seconds > 0 else None

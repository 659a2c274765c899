"""How much of a fleet a trace takes: load 1.0 is what a perfect router could just serve.

Prefill: every prompt token is computed once in the whole fleet, however often it comes. Decode: all workers run as many
answers at once as fit. The scarcer of both counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.traces import TraceRequest


def load_of(trace: Sequence[TraceRequest], fleet: FleetProfile) -> float:
    """Return the load of a trace as it is; raises ValueError if all requests arrive at once."""
    span = max((request.arrival for request in trace), default=0.0) - min(
        (request.arrival for request in trace), default=0.0
    )
    if span <= 0:
        raise ValueError("the trace's requests arrive at one moment, so it has no rate")
    return worker_seconds(trace, fleet) / span


def worker_seconds(trace: Sequence[TraceRequest], fleet: FleetProfile) -> float:
    """Return how long the whole fleet needs for a trace at best."""
    prefill, decode = prefill_seconds(trace, fleet), decode_seconds(trace, fleet)
    if not fleet.num_prefill:
        return (prefill + decode) / fleet.num_decode
    return max(prefill / fleet.num_prefill, decode / fleet.num_decode)


def prefill_seconds(trace: Sequence[TraceRequest], fleet: FleetProfile) -> float:
    """Return the worker-seconds of all prompts, if no block is computed twice."""
    profile = fleet.prefill if fleet.num_prefill else fleet.decode
    seen: set[int] = set()
    seconds = 0.0
    for request in trace:
        blocks = request.full_blocks
        num_found = next((place for place, block_id in enumerate(blocks) if block_id not in seen), len(blocks))
        seen.update(blocks)
        num_cached = min(num_found * request.block_tokens, request.num_prompt_tokens - 1)
        num_computed = request.num_prompt_tokens - num_cached
        num_steps = num_computed / profile.chunk_tokens
        seconds += profile.prompt_seconds(num_computed, num_cached) + num_steps * profile.step_ms / 1000
    return seconds


def device_seconds(request: TraceRequest, num_cached: int, fleet: FleetProfile) -> float:
    """Return the worker-seconds of one request of which so many prompt tokens are cached."""
    profile = fleet.prefill if fleet.num_prefill else fleet.decode
    num_computed = request.num_prompt_tokens - num_cached
    return profile.prompt_seconds(num_computed, num_cached) + decode_seconds([request], fleet)


def decode_seconds(trace: Sequence[TraceRequest], fleet: FleetProfile) -> float:
    """Return the worker-seconds of all answers at full batches."""
    profile = fleet.decode
    num_tokens = sum(request.num_output_tokens for request in trace)
    contexts = [request.num_prompt_tokens + request.num_output_tokens / 2 for request in trace]
    weighted = sum(context * request.num_output_tokens for context, request in zip(contexts, trace, strict=True)) / max(
        1, num_tokens
    )
    batch = max(1.0, min(profile.max_num_seqs, profile.kv_tokens / max(1.0, weighted)))
    step_ms = profile.step_ms + batch * (profile.answer_ms + profile.context_ms * weighted)
    return num_tokens / batch * step_ms / 1000

"""Computes the engine's current counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem_engine.messages import EngineStats
from tandem_engine.scheduling.block_pool import BlockPool
from tandem_engine.scheduling.request import Request, RequestState


def engine_stats(
    requests: Iterable[Request], num_running: int, pool: BlockPool, counters: Mapping[str, float]
) -> EngineStats:
    """Return the counts of all requests; those whose blocks are being imported count as waiting."""
    alive = [request for request in requests if request.state is not RequestState.HELD]
    return EngineStats(
        num_running=num_running,
        num_waiting=len(alive) - num_running,
        num_tokens_in_flight=sum(request.num_tokens for request in alive),
        num_total_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_used_blocks=pool.num_used,
        num_held_blocks=pool.num_held,
        counters=dict(counters),
    )

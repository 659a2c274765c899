"""How do the engine's figures look in a worker's report?"""

from __future__ import annotations

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages


def fill(report: pb.LoadReport, stats: messages.EngineStats, block_size: int, bytes_per_block: int) -> None:
    """Put an engine's figures into a report."""
    report.num_running = stats.num_running
    report.num_waiting = stats.num_waiting
    report.num_tokens_in_flight = stats.num_tokens_in_flight
    report.counters.update(stats.counters)
    report.kv.num_total_blocks = stats.num_total_blocks
    report.kv.num_free_blocks = stats.num_free_blocks
    report.kv.num_cached_blocks = stats.num_cached_blocks
    report.kv.num_used_blocks = stats.num_used_blocks
    report.kv.num_held_blocks = stats.num_held_blocks
    report.kv.tokens_per_block = block_size
    report.kv.bytes_per_block = bytes_per_block


def empty_pool(num_blocks: int) -> messages.EngineStats:
    """Return the figures of an engine that has not run a step yet."""
    return messages.EngineStats(
        num_running=0,
        num_waiting=0,
        num_tokens_in_flight=0,
        num_total_blocks=num_blocks,
        num_free_blocks=num_blocks,
        num_cached_blocks=0,
        num_used_blocks=0,
        num_held_blocks=0,
        counters={},
    )

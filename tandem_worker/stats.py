"""What a worker reports: its load to the control plane, its tables to the auditor, its metrics to a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import AttachmentRow, RequestRow, TablesReply
from tandem_engine.messages import EngineStats
from tandem_runtime import metrics
from tandem_runtime.kv import tables
from tandem_worker import engine_totals
from tandem_worker.kv_connector import KVConnector
from tandem_worker.requests import ActiveRequest, RequestTable


def fill_load(report: pb.LoadReport, stats: EngineStats, block_size: int, bytes_per_block: int) -> None:
    """Write the engine's stats into a report."""
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


def stats_of_empty_pool(num_blocks: int) -> EngineStats:
    """Return the stats of an engine that has not run a step yet."""
    return EngineStats(
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


def worker_tables(
    incarnation: str,
    requests: RequestTable,
    connector: KVConnector,
    pool: pb.KvPool,
    attachments: Iterable[AttachmentRow],
    max_rows: int,
) -> TablesReply:
    """Return the requests, handles and pulls, at most `max_rows` of each, the pool after the last step, and streams."""
    reply = TablesReply(
        incarnation=incarnation,
        now_unix_ms=int(time.time() * 1000),
        pool=pool,
        num_requests_so_far=requests.num_so_far,
        attachments=attachments,
    )
    active = list(requests)
    reply.num_left_out = tables.fill(reply.requests, active, lambda request: _row(request, pool), max_rows)
    connector.fill_tables(reply, active, max_rows)
    return reply


def _row(request: ActiveRequest, pool: pb.KvPool) -> RequestRow:
    submit = request.submit
    num_blocks = -(-len(submit.token_ids) // max(1, pool.tokens_per_block))
    return RequestRow(
        request_id=submit.request_id,
        attempt=submit.attempt,
        gateway_id=request.stream.gateway_id,
        num_bytes=num_blocks * pool.bytes_per_block,
        deadline_unix_ms=request.deadline_unix_ms,
        handle_id=submit.handle.handle_id,
    )


def export_metrics(stats: Callable[[], EngineStats | None], bytes_per_block: Callable[[], int]) -> None:
    """Export the engine's stats after its last step.

    `stats` and `bytes_per_block` are called in any thread; `stats` returns a frozen value.
    """
    meter = metrics.meter()

    def blocks(options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(number, {"state": state}) for state, number in _blocks(stats()).items()]

    def sizes(options: CallbackOptions) -> Iterable[Observation]:
        size = bytes_per_block()
        return [Observation(number * size, {"state": state}) for state, number in _blocks(stats()).items()]

    meter.create_observable_gauge("tandem.worker.kv_blocks", [blocks], "{block}", "Blocks of the KV pool, by state.")
    meter.create_observable_gauge("tandem.worker.kv.size", [sizes], "By", "Bytes of the KV pool, by state.")
    engine_totals.export(stats, engine_totals.GENERATION)


def tokens_by_phase(now: EngineStats | None) -> dict[str, float]:
    """Return the tokens of each phase since start, as labels of metrics name the phases."""
    if now is None:
        return {}
    return {"prefill": now.counters["prompt_tokens_computed"], "decode": now.counters["tokens_generated"]}


def _blocks(now: EngineStats | None) -> dict[str, int]:
    if now is None:
        return {}
    return {
        "free": now.num_free_blocks,
        "cached": now.num_cached_blocks,
        "used": now.num_used_blocks,
        "held": now.num_held_blocks,
    }

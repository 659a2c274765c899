"""What does a worker believe it holds? Its answer to the auditor."""

from __future__ import annotations

import time

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import RequestRow, TablesReply
from tandem_runtime.kv.tables import fill
from tandem_worker.kv_connector import HandOver
from tandem_worker.requests import ActiveRequest, RequestTable


def worker_tables(
    incarnation: str, requests: RequestTable, hand_over: HandOver, pool: pb.KvPool, max_rows: int
) -> TablesReply:
    """Return requests, holds and pulls, `max_rows` of each at most, and the pool as of the engine's last step."""
    reply = TablesReply(
        incarnation=incarnation,
        now_unix_ms=int(time.time() * 1000),
        pool=pool,
        num_requests_so_far=requests.num_so_far,
    )
    active = list(requests)
    reply.num_left_out = fill(reply.requests, active, lambda request: _row(request, pool), max_rows)
    hand_over.fill_tables(reply, active, max_rows)
    return reply


def _row(request: ActiveRequest, pool: pb.KvPool) -> RequestRow:
    submit = request.submit
    num_blocks = -(-len(submit.token_ids) // max(1, pool.tokens_per_block))
    return RequestRow(
        request_id=submit.request_id,
        attempt=submit.attempt,
        gateway_id=request.stream.gateway_id,
        num_bytes=num_blocks * pool.bytes_per_block,
        deadline_unix_ms=submit.deadline_unix_ms,
        handle_id=submit.handle.handle_id,
    )

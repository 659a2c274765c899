"""A worker reports to the auditor the blocks that it keeps for others, until they are released."""

from __future__ import annotations

from pathlib import Path

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_runtime.kv.tables import prompt_bytes
from tandem_worker.kv_connector import KVConnector
from tandem_worker.model_card import kv_layout
from tandem_worker.requests import ActiveRequest, RequestTable
from tandem_worker.stats import worker_tables
from tests.decode_svc import test_kv_consumer as decode
from tests.kv_transfer_svc.host import a_client
from tests.prefill_svc import test_kv_producer as prefill
from tests.tandem_worker.kv_harness import NUM_TOKENS, a_request, until
from tests.tandem_worker.scripted_engine import LAYOUT

POOL = pb.KvPool(num_used_blocks=4, tokens_per_block=16, bytes_per_block=8192)


def tables(connector: KVConnector, *requests: ActiveRequest, max_rows: int = 10) -> TablesReply:
    table = RequestTable()
    for request in requests:
        table.add(request)
    return worker_tables("worker-1", table, connector, POOL, (), max_rows)


async def test_prefill_names_the_handles_it_holds_blocks_for_until_they_end(tmp_path: Path) -> None:
    async with prefill.harness(tmp_path) as here, a_client(here.host) as reader:
        handle = here.handle()
        request = here.begin(handle)
        here.finish(request)
        await prefill.watch(reader, handle)
        (row,) = tables(here.connector).holds
        assert (row.handle_id, row.request_id, row.attempt) == (handle.handle_id, handle.request_id, handle.attempt)
        assert row.holder_incarnation == here.host.incarnation
        assert row.num_bytes == prompt_bytes(kv_layout(LAYOUT), handle.num_tokens) > 0
        await reader.release(handle, "reader")
        await here.released("r.0")
        assert not tables(here.connector).holds


async def test_decode_names_the_handles_it_is_pulling_from_while_it_is(tmp_path: Path) -> None:
    async with decode.harness(tmp_path) as here:
        handle = await here.reserve()
        request = here.begin(a_request(handle))
        (row,) = tables(here.connector, request).pulls
        assert (row.handle_id, row.reader_id, row.kv_address) == (handle.handle_id, "r", here.host.address)
        await here.seal_all(handle)
        await until(lambda: not tables(here.connector, request).pulls)


async def test_requests_are_named_with_whom_they_are_for_and_what_is_too_much_is_counted(tmp_path: Path) -> None:
    async with decode.harness(tmp_path) as here:
        handle = await here.reserve()
        first, second = a_request(handle), a_request(handle, "s")
        reply = tables(here.connector, first, second, max_rows=1)
        (row,) = reply.requests
        assert (row.request_id, row.handle_id, row.num_bytes) == ("r", handle.handle_id, NUM_TOKENS // 16 * 8192)
        assert (reply.num_left_out, reply.num_requests_so_far, reply.pool) == (1, 2, POOL)
        assert reply.lease_ms == 10_000

"""Tests that blocks of another layout are pulled as they are and described to the engine, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decode_svc.handle_layout import handle_layout
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_engine.messages import ImportSlab, Recompute, SourceLayout, StartDecode
from tandem_runtime.errors import FingerprintMismatch
from tandem_runtime.kv.layout import layout_digest
from tandem_worker.model_card import kv_layout
from tandem_worker.settings import WorkerSettings
from tests.decode_svc.test_kv_consumer import Harness, harness
from tests.kv_transfer_svc.host import nothing_is_left, running_host, running_writer
from tests.kv_transfer_svc.layout import SIGNER
from tests.tandem_worker.kv_harness import a_handle, a_request, until
from tests.tandem_worker.scripted_engine import LAYOUT

OURS = kv_layout(LAYOUT)


def other(**changes: Any) -> pb.KvLayout:
    """Return a layout with blocks of 32 tokens in bfloat16, as many bytes as ours."""
    layout = pb.KvLayout()
    layout.CopyFrom(OURS)
    for name, value in {"tokens_per_block": 32, "dtype": "bfloat16", **changes}.items():
        setattr(layout.groups[0], name, value)
    return layout


def a_submit(theirs: pb.KvLayout, digest: bytes = b"") -> pb.Submit:
    handle = pb.KvHandle(layout_digest=digest or layout_digest(theirs))
    return pb.Submit(handle=handle, handle_layout=theirs)


def test_blocks_of_this_workers_layout_are_not_converted() -> None:
    for submit in (pb.Submit(), a_submit(OURS)):
        assert handle_layout(submit, OURS).source is None
        assert handle_layout(submit, OURS).first_block(35) == 2


def test_another_layout_of_the_family_is_described_to_the_engine() -> None:
    found = handle_layout(a_submit(other()), OURS)
    assert found.layout == other()
    assert found.source == SourceLayout(32, "bfloat16", "layer,kv,head,token,dim", 8192)
    assert [found.first_block(num_tokens) for num_tokens in (0, 31, 32, 80)] == [0, 0, 1, 2]


def test_a_layout_that_may_not_be_read_is_refused_and_the_field_named() -> None:
    mixed = other()
    mixed.groups.append(other(dtype="float32", window=8).groups[0])
    ours_mixed = pb.KvLayout()
    ours_mixed.CopyFrom(OURS)
    ours_mixed.groups.append(mixed.groups[1])
    refusals = [
        (a_submit(other(), digest=b"\1" * 16), OURS, "handle_layout", "the handle 0101"),
        (a_submit(other(num_kv_heads=4)), OURS, "handle_layout.groups[0].num_kv_heads", "2 here, 4 there"),
        (a_submit(other(window=9)), OURS, "handle_layout.groups[0].window", "cannot be converted"),
        (
            a_submit(mixed),
            ours_mixed,
            "handle_layout.groups[1].dtype",
            "group 1 of the handle's layout has dtype float32, group 0 bfloat16",
        ),
    ]
    for submit, ours, field, message in refusals:
        with pytest.raises(FingerprintMismatch) as raised:
            handle_layout(submit, ours)
        assert raised.value.field == field and message in raised.value.message


async def reserved(here: Harness, theirs: pb.KvLayout) -> pb.KvHandle:
    handle = a_handle(here.writer)
    handle.layout_digest = layout_digest(theirs)
    handle = SIGNER.sign(handle)
    await here.writer.client.reserve(handle, here.writer.region_id, theirs)
    return handle


async def seal(here: Harness, handle: pb.KvHandle) -> None:
    closing = kv.Closed(num_blocks=2, first_tokens=[kv.FirstToken(token_id=7)])
    await here.writer.client.seal(handle, [here.writer.slab(0, 0, [5, 3])], closing)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("num_cached_blocks", [0, 1, 3])
async def test_the_kv_service_brings_the_writers_blocks_and_the_engine_converts_them(
    tmp_path: Path, transport: str, num_cached_blocks: int
) -> None:
    async with harness(tmp_path, kv_transport=transport) as here:
        handle = await reserved(here, other())
        request = a_request(handle, handle_layout=other())
        here.begin(request, num_cached_blocks)  # of 16 tokens; the writer's have 32
        assert here.connector.mode(request.submit) == "decode"
        here.connector.fill_tables(reply := TablesReply(), [request], 10)
        assert [row.num_bytes for row in reply.pulls] == [2 * 8192]
        await seal(here, handle)
        assert await here.sent(StartDecode) == StartDecode("r.0", [7])
        (imported,) = here.engine.sent_of(ImportSlab)
        first = num_cached_blocks // 2
        assert (imported.first_block, len(imported.extents)) == (first, 2 - first)
        assert imported.layout == SourceLayout(32, "bfloat16", "layer,kv,head,token,dim", 8192)
        assert request.ledger.num_bytes_pulled == (2 - first) * 8192
        await until(lambda: nothing_is_left(here.host))


async def test_blocks_of_another_host_and_layout_pass_through_a_small_arena_as_they_are(tmp_path: Path) -> None:
    async with (
        running_host(tmp_path, arena_bytes=2 * 8192) as host,
        running_host(tmp_path) as far,
        running_writer(far) as writer,
    ):
        here = Harness(host, writer, WorkerSettings())
        await here.link.wait_client()
        theirs = other(tokens_per_block=8)
        handle = await reserved(here, theirs)
        request = here.begin(a_request(handle, handle_layout=theirs), 1)
        closing = kv.Closed(num_blocks=8, first_tokens=[kv.FirstToken(token_id=7)])
        await writer.client.seal(handle, [writer.slab(0, 0, list(range(8)))], closing)
        assert await here.sent(StartDecode) == StartDecode("r.0", [7])
        imported = here.engine.sent_of(ImportSlab)
        assert [(each.first_block, len(each.extents)) for each in imported] == [(index, 1) for index in range(2, 8)]
        assert all(each.layout.tokens_per_block == 8 for each in imported)
        assert request.ledger.num_bytes_pulled == 6 * 8192 > host.arena.total_bytes
        await until(lambda: nothing_is_left(host) and nothing_is_left(far))
        await here.connector.close()
        await here.link.close()


async def test_a_handle_of_another_layout_without_a_word_of_it_is_refused_and_the_prompt_computed(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as here:
        handle = await reserved(here, other())
        here.begin(a_request(handle))
        await seal(here, handle)
        assert await here.sent(Recompute) == Recompute("r.0")
        assert here.connector.counters()["kv_pull_failures"] == 1 and not here.engine.sent_of(ImportSlab)
        await until(lambda: nothing_is_left(here.host))


async def test_blocks_that_the_engine_cannot_convert_are_computed_here(tmp_path: Path) -> None:
    theirs = other(dtype="float8_e4m3")
    async with harness(tmp_path) as here:
        here.import_error = "KV blocks in float8_e4m3 cannot be converted"
        handle = await reserved(here, theirs)
        here.begin(a_request(handle, handle_layout=theirs))
        await seal(here, handle)
        await until(lambda: here.connector.counters()["kv_pull_failures"] == 1)
        await until(lambda: nothing_is_left(here.host))

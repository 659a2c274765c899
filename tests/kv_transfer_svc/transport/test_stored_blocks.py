"""Tests that stored blocks of another host arrive over the link's best transport, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv_transfer_svc.host import a_client, running_writer
from tests.kv_transfer_svc.layout import BLOCK_BYTES
from tests.kv_transfer_svc.test_host_cache import chain, content, published, wanted
from tests.kv_transfer_svc.transport.harness import TransferFault, link_of, linked_host, proxied


async def test_they_come_over_tcp_and_nothing_stays_lent(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (near, _), linked_host(tmp_path) as (far, _), running_writer(far) as writer:
        await writer.client.publish(published(writer, chain(5), range(5)))
        async with a_client(near) as reader:
            reply = await reader.load(wanted(chain(7), source=far.address))
            assert reply.num_from_host == 5
            assert content(near, reply) == [writer.block(slot) for slot in range(5)]
        link = link_of(near)
        assert (link.transport, link.num_transfers, link.num_bytes) == ("tcp", 1, 5 * BLOCK_BYTES)
        assert far.host_cache.blocks.stats().num_leases == 0
        near.host_cache.blocks.check()


async def test_a_chain_that_the_other_host_does_not_have_is_no_error(tmp_path: Path) -> None:
    async with linked_host(tmp_path) as (near, _), linked_host(tmp_path) as (far, _), a_client(near) as reader:
        assert not (await reader.load(wanted(chain(3), source=far.address))).blocks
        link = link_of(near)
        assert (link.transport, link.num_errors, link.note) == ("tcp", 0, "")


@pytest.mark.parametrize("kind", ["flip", "cut"])
async def test_what_is_spoilt_on_the_wire_is_seen_and_read_again_over_grpc(tmp_path: Path, kind: str) -> None:
    async with linked_host(tmp_path) as (near, _), linked_host(tmp_path) as (far, _), running_writer(far) as writer:
        await writer.client.publish(published(writer, chain(5), range(5)))
        async with proxied(far) as proxy, a_client(near) as reader:
            await reader.load(wanted(chain(1, "first contact"), "probe", source=far.address))
            proxy.fault = TransferFault(kind, after=2 * BLOCK_BYTES)
            reply = await reader.load(wanted(chain(5), source=far.address))
            assert content(near, reply) == [writer.block(slot) for slot in range(5)]
            assert near.store.counters["link_errors"] == 1
            assert near.store.counters["checksum_failures"] == (kind == "flip")


async def test_services_of_one_host_read_them_over_grpc(tmp_path: Path) -> None:
    transports = ("shm", "tcp", "grpc")
    async with (
        linked_host(tmp_path, host_id="h", transports=transports) as (near, _),
        linked_host(tmp_path, host_id="h", transports=transports) as (far, _),
        running_writer(far) as writer,
        a_client(near) as reader,
    ):
        await writer.client.publish(published(writer, chain(2), range(2)))
        assert (await reader.load(wanted(chain(2), source=far.address))).num_from_host == 2
        assert (link_of(near).transport, link_of(near).num_errors) == ("shm", 0)

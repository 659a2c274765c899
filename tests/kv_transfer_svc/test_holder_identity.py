"""With certificates, only the KV service that a gateway has named can answer: no other one of the fleet."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from kv_transfer_svc.blocks.block import BlockKey
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.plaintext import Plaintext
from tandem_runtime.errors import TandemError, Unavailable
from tandem_runtime.kv_handle import HandleState
from tests.certificates import Authority
from tests.kv_transfer_svc.host import Host, a_client, closed, running_writer, until, watch_all
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.test_two_hosts import bytes_at
from tests.kv_transfer_svc.transport.harness import everything_is_back, link_of, linked_host, sealed

SLOTS = [5, 3, 8, 1]


class Fleet:
    """The members of one fleet, with what they need to be KV services and workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = Authority()
        self.prefill, self.decode = self.member("prefill"), self.member("decode")

    def member(self, role: str = "kv") -> FleetMember:
        return self._authority.member(self._folder, role)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_a_stolen_kv_service_cannot_answer_in_the_holders_place(tmp_path: Path, transport: str) -> None:
    fleet = Fleet(tmp_path)
    robbed, thief, ours = (fleet.member() for _ in range(3))
    async with (
        linked_host(tmp_path, member=ours, transports=(transport, "grpc")) as (here, _),
        linked_host(tmp_path, member=thief) as (there, _),
        running_writer(there, fleet.prefill) as writer,
        a_client(here, fleet.decode) as reader,
    ):
        # 1. A handle names the KV service that was there; the thief has its address, and its own certificate.
        writer.holder_id = robbed.identity.id
        handle = await sealed(writer, SLOTS)
        with pytest.raises(TandemError):
            await watch_all(reader, handle, "r")
        assert here.store.counters["bytes_pulled"] == there.store.counters["bytes_served"] == 0
        assert await reader.release(handle, "r") is HandleState.RELEASED

        # 2. As itself it serves.
        writer.holder_id = thief.identity.id
        other = await sealed(writer, SLOTS)
        event, _ = await watch_all(reader, other, "r")
        assert event.transport == transport
        assert await bytes_at(here, event.slab) == b"".join(map(writer.block, SLOTS))
        await reader.release(other, "r")
        await writer.client.release_all(handle)
        await everything_is_back(here, there)


async def test_a_prompt_passes_in_windows_between_hosts_with_certificates(tmp_path: Path) -> None:
    """The KV service of the readers' host acknowledges in their name: the holder has to let it."""
    fleet = Fleet(tmp_path)
    async with (
        linked_host(tmp_path, member=fleet.member()) as (here, _),
        linked_host(tmp_path, member=(holder := fleet.member())) as (there, _),
        running_writer(there, fleet.prefill) as writer,
        a_client(here, fleet.decode) as reader,
    ):
        writer.holder_id = holder.identity.id
        handle = writer.handle(num_blocks=2)
        await writer.client.reserve(handle, writer.region_id, a_layout(), max_held_bytes=2 * BLOCK_BYTES)
        watching = reader.watch(handle, "r", a_layout(), acknowledges=True)
        for index, slot in enumerate((5, 3)):
            last = closed(2) if index else None
            await writer.client.seal(handle, [writer.slab(index, index, [slot])], last)
            slab = (await anext(watching)).slab
            assert await bytes_at(here, slab) == writer.block(slot)
            await reader.acknowledge(handle, "r", index + 1)
            await until(partial(_has_passed, there, handle, index + 1))
        assert [event async for event in watching][-1].closed.num_blocks == 2
        await reader.release(handle, "r")
        await everything_is_back(here, there)


def _has_passed(holder: Host, handle: pb.KvHandle, num_slabs: int) -> bool:
    """Return whether the holder knows that the readers have copied that many slabs."""
    return holder.store.find(handle).copied.num_by_all == num_slabs


async def test_stored_blocks_are_fetched_from_the_named_kv_service_only(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    robbed, thief, ours = (fleet.member() for _ in range(3))
    async with (
        linked_host(tmp_path, member=ours, transports=("grpc",)) as (here, _),
        linked_host(tmp_path, member=thief) as (there, _),
    ):
        keys, into = [BlockKey(b"l" * 16, 0, b"h" * 16)], [memoryview(bytearray(BLOCK_BYTES))]
        with pytest.raises(Unavailable):
            await here.service.puller.fetch_blocks(there.address, robbed.identity.id, keys, into)
        assert await here.service.puller.fetch_blocks(there.address, thief.identity.id, keys, into) == []


async def test_data_connections_are_to_the_named_kv_service_only(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    another, holder, ours = (fleet.member() for _ in range(3))
    async with (
        linked_host(tmp_path, member=ours) as (here, _),
        linked_host(tmp_path, member=holder) as (there, _),
    ):
        there.service.handshake.identity = another.identity.uri
        here.service.puller.links.to(there.address, holder.identity.id).open()
        await until(lambda: link_of(here).note != "")
        assert f"kv {holder.identity.id} offers data connections to" in link_of(here).note
        assert link_of(here).transport == "grpc"


async def test_a_holder_without_a_certificate_is_reached_until_the_set_time_only(tmp_path: Path) -> None:
    ours = Fleet(tmp_path).member()
    async with linked_host(tmp_path, member=ours) as (here, _), linked_host(tmp_path) as (there, _):
        links = here.service.puller.links
        with pytest.raises(Unavailable, match="'kv-host-7' has registered without a certificate"):
            links.to(there.address, "kv-host-7")
        ours.plaintext = Plaintext(time.time() + 3600)
        await links.to(there.address, "kv-host-7").client.probe(1)
        with pytest.raises(Unavailable):
            await links.to(there.address, ours.identity.id).client.probe(1)
        ours.plaintext = Plaintext(time.time() - 1)
        with pytest.raises(Unavailable, match="registered without a certificate"):
            links.to(there.address, "kv-host-7")

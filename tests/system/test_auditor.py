"""The auditor finds what real processes keep in vain, and nothing in a busy fleet."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from control_plane.secrets import handle_signer
from tandem_client.cli.fleet import parse_fleet
from tandem_client.cli.status import fleet_view
from tests.kv_transfer_svc.layout import BLOCK_BYTES, a_layout
from tests.kv_transfer_svc.writer import Writer
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import client, stream

LEASE = ("--lease-seconds", "2")


@asynccontextmanager
async def audited_fleet(folder: Path) -> AsyncIterator[Fleet]:
    async with Fleet(folder, audit_seconds=0.3, audit_grace_seconds=1.0) as fleet:
        fleet.start("kv", "kv-0", *LEASE)
        fleet.start("prefill", "prefill-0", *SMALL, *LEASE)
        fleet.start("decode", "decode-0", *SMALL, *LEASE)
        await fleet.ready()
        yield fleet


@asynccontextmanager
async def stranger(fleet: Fleet) -> AsyncIterator[Writer]:
    """Somebody who lends the KV service memory, and is no worker."""
    kv = fleet.registry.get("kv-0")
    assert kv is not None, "registered"
    writer = Writer(kv.info.kv_socket, kv.info.address, kv.incarnation, lease_seconds=2.0)
    try:
        await writer.lend()
        yield writer
    finally:
        await writer.close()


def found(fleet: Fleet) -> set[str]:
    return {finding.suspicion.kind for finding in fleet.gateway.auditor.report.findings}


async def status(fleet: Fleet) -> str:
    async with httpx.AsyncClient(base_url=fleet.base_url) as http:
        members = parse_fleet((await http.get("/v1/workers")).json())
    console = Console(width=200, record=True)
    with console.capture() as shown:
        console.print(fleet_view(members, fleet.base_url))
    return shown.get()


@pytest.mark.timeout(240)
async def test_a_busy_fleet_shows_no_orphans_and_a_leak_is_named_until_it_is_gone(tmp_path: Path) -> None:
    async with audited_fleet(tmp_path) as fleet, client(fleet.base_url) as http:
        auditor = fleet.gateway.auditor
        # 1. Streams in flight, some of which the client leaves: whatever audits see, it does not last.
        prompts = [f"Tell me about number {number}. " * (1 + number % 5) for number in range(8)]
        streams = [
            asyncio.create_task(stream(http, {"prompt": prompt, "max_tokens": 24}, leave_after=leave_after))
            for prompt, leave_after in zip(prompts, cycle([3, None, None, None]), strict=False)
        ]
        busy = False
        while not all(each.done() for each in streams):
            report = await auditor.audit()
            busy = busy or (report.num_answered == 3 and not all(each.done() for each in streams))
            assert (report.orphan_bytes, report.findings) == (0, ())
        await asyncio.gather(*streams)
        assert busy, "the streams were over before anyone looked"
        report = await auditor.verdict()
        assert (report.findings, report.num_suspicions, report.unanswered) == ((), 0, {})
        assert "orphaned" not in await status(fleet)

        # 2. A handle whose owner is no worker, renewed for ever.
        async with stranger(fleet) as writer:
            handle = handle_signer(fleet.gateway._secret).sign(writer.handle(num_blocks=2))
            await writer.client.reserve(handle, writer.region_id, a_layout())
            await writer.client.seal(handle, [writer.slab(0, 0, [0])])
            await until(lambda: found(fleet) == {"owner_gone", "orphaned_region"}, 30)
            names = {each.suspicion.name: each.num_bytes for each in auditor.report.findings}
            assert names[f"{handle.request_id}/{handle.handle_id.hex()}"] == BLOCK_BYTES
            assert auditor.report.orphan_bytes == names[writer.region_id] == writer.region.total_bytes
            assert "a handle whose prefill worker is gone" in await status(fleet)
        await until(lambda: not found(fleet), 30)

        # 3. A worker that is stopped for longer than anybody waits: its memory stays mapped until it is back, or dead.
        prefill = fleet.services["prefill-0"]
        prefill.kill(signal.SIGSTOP)
        try:
            await until(lambda: "orphaned_region" in found(fleet), 40)
            assert (await auditor.audit()).orphan_bytes > 0
        finally:
            prefill.kill(signal.SIGCONT)
        await until(lambda: not found(fleet), 30)
        await fleet.ready()
        assert (await auditor.verdict()).orphan_bytes == 0
        await fleet.pools_are_full()

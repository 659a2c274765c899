"""A gateway ends handles at the KV service that it has named in them, and at no other one."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from control_plane.fleet.kv_clients import KvClients
from tandem_runtime.errors import Aborted
from tandem_runtime.kv import client
from tests.certificates import Authority
from tests.kv_transfer_svc.host import nothing_is_left, running_host, running_writer
from tests.kv_transfer_svc.layout import a_layout


async def test_a_handle_is_ended_at_the_kv_service_whose_id_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_RETRY_SECONDS", (60.0,))  # beyond a call's time: nothing is tried again
    authority = Authority()
    gateway, prefill, robbed, thief = (authority.member(tmp_path, role) for role in ("gateway", "prefill", "kv", "kv"))
    clients = KvClients("gateway-1", gateway)
    async with running_host(tmp_path, member=thief) as host, running_writer(host, prefill) as writer:
        handles = []
        for holder in (robbed, thief):
            writer.holder_id = holder.identity.id
            handles.append(writer.handle())
            await writer.client.reserve(handles[-1], writer.region_id, a_layout())
        with capture_logs() as lines:
            await clients.release_all(handles[0], 30.0)
            await clients.release(handles[0], "r", 30.0)
            await clients.abort(handles[0], Aborted("the client has left"), 30.0)
        assert [line["event"] for line in lines] == ["kv_release_failed", "kv_release_failed", "kv_abort_failed"]
        assert not nothing_is_left(host)
        await clients.release_all(handles[1], 30.0)
        assert host.store.num_live == 1
        await writer.client.release_all(handles[0])
        assert nothing_is_left(host)
    await clients.close()

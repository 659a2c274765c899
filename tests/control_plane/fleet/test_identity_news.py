"""Replies to Register and Heartbeat tell members who is revoked and which trust bundle is the newest."""

from __future__ import annotations

from control_plane.fleet.registration import ControlPlaneService
from control_plane.fleet.registry import WorkerRegistry
from control_plane.secrets import kv_keys
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb

INFO = pb.WorkerInfo(
    worker_id="ab" * 8, incarnation="one", role=pb.WORKER_ROLE_DECODE, address="127.0.0.1:1", host_id="h"
)


class _News:
    """A deny list of three ids, and trust bundle 5."""

    bundle_number = 5

    def denied_since(self, number: int) -> cp.DenyList:
        return cp.DenyList(number=3, ids=[f"{each:016x}" for each in range(number + 1, 4)])


class _Context:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:1000"


async def test_each_reply_has_what_its_sender_lacks() -> None:
    service = ControlPlaneService(WorkerRegistry(3.0, 5.0), kv_keys(b"s" * 32), [], news=_News())
    registered = await service.Register(cp.RegisterRequest(info=INFO), _Context())
    assert (registered.bundle_number, registered.deny_list.number, len(registered.deny_list.ids)) == (5, 3, 3)
    for known, missing in ((0, 3), (2, 1), (3, 0)):
        beat = cp.HeartbeatRequest(worker_id=INFO.worker_id, incarnation="one", deny_list_number=known)
        reply = await service.Heartbeat(beat, _Context())
        assert (reply.known, reply.bundle_number, reply.deny_list.number) == (True, 5, 3)
        assert len(reply.deny_list.ids) == missing
    # A process that the registry does not know hears it too: it registers again.
    stranger = await service.Heartbeat(cp.HeartbeatRequest(worker_id="cd" * 8, incarnation="x"), _Context())
    assert (stranger.known, len(stranger.deny_list.ids)) == (False, 3)


async def test_a_gateway_without_a_fleet_says_nothing_of_certificates() -> None:
    service = ControlPlaneService(WorkerRegistry(3.0, 5.0), kv_keys(b"s" * 32), [])
    reply = await service.Register(cp.RegisterRequest(info=INFO), _Context())
    assert (reply.bundle_number, reply.HasField("deny_list")) == (0, False)

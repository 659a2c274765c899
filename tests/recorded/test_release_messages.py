"""This release and release 0.2 understand each other's messages, by messages that release 0.2 has sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from control_plane.fleet.registration import ControlPlaneService
from control_plane.fleet.registry import WorkerRegistry
from control_plane.secrets import kv_keys
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import control_plane_pb2_grpc as cp_grpc
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import tables_pb2, worker_pb2
from tandem.v1 import types_pb2 as pb
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import Unauthenticated
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.signatures import HandleVerifier
from tandem_runtime.server import GrpcServer
from tandem_worker import convert

_FOLDER = Path(__file__).parent / "v0_2_0"
_FILES = sorted(path.name for path in _FOLDER.glob("*.bin"))
_MODULES = (cp, kv, tables_pb2, pb, worker_pb2)


def _old_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    described = descriptor_pb2.FileDescriptorSet.FromString((_FOLDER / "descriptors.binpb").read_bytes())
    for file in described.file:
        pool.Add(file)
    return pool


_OLD = _old_pool()


def _old_class(name: str) -> type[Message]:
    return message_factory.GetMessageClass(_OLD.FindMessageTypeByName(f"tandem.v1.{name}"))


def _class(name: str) -> type[Message]:
    found: type[Message] = next(getattr(module, name) for module in _MODULES if hasattr(module, name))
    return found


def _read(start: str, kind: type[Any]) -> Iterator[Any]:
    """Yield the recorded messages whose file names begin so, as this release parses them."""
    names = [name for name in _FILES if name.startswith(start)]
    assert names, f"no message {start} was recorded"
    for name in names:
        yield kind.FromString((_FOLDER / name).read_bytes())


def _submits() -> list[pb.Submit]:
    """Return the requests, without probes: those have no cache."""
    commands = list(_read("WorkerService.Attach.request.submit", pb.Command))
    return [command.submit for command in commands if not command.submit.request_id.startswith("probe-")]


# ---------------------------------------------------------------------------------------------------- old to new


@pytest.mark.parametrize("name", _FILES)
def test_every_message_of_the_release_before_means_the_same_here(name: str) -> None:
    data, kind = (_FOLDER / name).read_bytes(), name.split(".")[-2]
    old, new = _old_class(kind).FromString(data), _class(kind).FromString(data)
    assert json_format.MessageToDict(new) == json_format.MessageToDict(old)
    assert _old_class(kind).FromString(new.SerializeToString()) == old, "nothing is lost on the way back"


async def test_the_registry_takes_in_the_workers_of_the_release_before() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    service = ControlPlaneService(registry, kv_keys(b"s" * 32), [], macs_until=time.time() + 60)
    server = GrpcServer(
        "127.0.0.1:0", lambda each: cp_grpc.add_ControlPlaneServiceServicer_to_server(service, each), []
    )
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            stub = cp_grpc.ControlPlaneServiceStub(channel)
            for register in _read("ControlPlaneService.Register.request", cp.RegisterRequest):
                reply = await stub.Register(register)
                has_key = register.info.role == pb.WORKER_ROLE_KV
                assert bool(reply.handle_key) == has_key, "a KV service of that release needs the key of the MACs"
            for heartbeat in _read("ControlPlaneService.Heartbeat.request", cp.HeartbeatRequest):
                await stub.Heartbeat(heartbeat)
            roles = {worker.role: worker for worker in registry.workers()}
            assert set(roles) == {pb.WORKER_ROLE_KV, pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE}
            for role in (pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE):
                card = roles[role].info.card
                assert (card.model_id, card.takes_spaces, card.exactness) == ("@tandem/demo", False, "")
            for deregister in _read("ControlPlaneService.Deregister.request", cp.DeregisterRequest):
                await stub.Deregister(deregister)
            assert registry.workers() == []
    finally:
        await server.stop(0)


def test_a_worker_reads_the_requests_of_a_gateway_of_the_release_before() -> None:
    assert _submits()
    for submit in _submits():
        command = convert.add_request(submit, submit.request_id, "decode")
        assert command.sampling.max_tokens == 6
        assert not submit.space
        assert submit.hash_grain == 0
        assert len(submit.block_hashes) == len(submit.token_ids) // 16, "a worker's own keys, of its own blocks"


def test_a_kv_service_accepts_the_handles_of_a_gateway_of_the_release_before_for_a_while() -> None:
    [reply, *_] = _read("ControlPlaneService.Register.reply.kv", cp.RegisterReply)
    cards = [each.info.card for each in _read("ControlPlaneService.Register.request.loaded", cp.RegisterRequest)]
    layouts = {layout_digest(card.layout) for card in cards if card.model_id}
    handles = [submit.handle for submit in _submits()]
    handles += [reserve.handle for reserve in _read("KvTransferService.Reserve.request", kv.ReserveRequest)]
    now = 1_000.0
    verifier = HandleVerifier(lambda: KvKeys.of(reply), macs_until=now + 60, clock=lambda: now)
    for handle in handles:
        verifier.verify(handle)
        assert handle.layout_digest in layouts, "the digest is over the same bytes in both releases"
    now += 61
    with pytest.raises(Unauthenticated):
        verifier.verify(handles[0])


def test_what_the_kv_services_of_the_release_before_ask_leaves_out_what_they_do_not_know() -> None:
    for watch in _read("KvTransferService.Watch.request", kv.WatchRequest):
        assert (watch.acknowledges, watch.HasField("time_left_ms")) == (False, False)
    for reserve in _read("KvTransferService.Reserve.request", kv.ReserveRequest):
        assert not reserve.HasField("time_left_ms")


# ---------------------------------------------------------------------------------------------------- new to old


def test_a_request_of_this_release_is_whole_for_a_worker_of_the_release_before() -> None:
    old_command = _old_class("Command")
    for submit in _submits():
        before = old_command.FromString(pb.Command(submit=submit).SerializeToString())
        submit.space, submit.hash_grain, submit.time_left_ms = b"s" * 16, 16, 5_000
        submit.prefix_source_id, submit.prefix_wait_ms = "0123456789abcdef", 700
        submit.handle.signature, submit.handle.holder_id = b"x" * 73, "0123456789abcdef"
        after: Any = old_command.FromString(pb.Command(submit=submit).SerializeToString())
        _without_unknown(after)
        assert after == before


def test_a_reply_to_a_registration_is_whole_for_a_process_of_the_release_before() -> None:
    old_reply = _old_class("RegisterReply")
    for reply in _read("ControlPlaneService.Register.reply", cp.RegisterReply):
        before = old_reply.FromString(reply.SerializeToString())
        reply.handle_public_keys.append(b"k" * 32)
        reply.link_key, reply.bundle_number = b"l" * 32, 3
        reply.deny_list.number = 7
        after: Any = old_reply.FromString(reply.SerializeToString())
        _without_unknown(after)
        assert after == before


def _without_unknown(message: Any) -> None:
    message.DiscardUnknownFields()


# ---------------------------------------------------------------------------------------------------- the protocol


def _messages() -> list[Descriptor]:
    described = descriptor_pb2.FileDescriptorSet.FromString((_FOLDER / "descriptors.binpb").read_bytes())
    names = [f"{file.package}.{each.name}" for file in described.file for each in file.message_type]
    return [_OLD.FindMessageTypeByName(name) for name in names]


_MAY_BE_ABSENT = {"Device": {"foreign_bytes", "utilization_percent", "temperature_celsius", "power_milliwatts"}}
"""Fields whose absence has a meaning now. On the wire it is the same: the release before reads 0, and sends no 0."""


@pytest.mark.parametrize("old", _messages(), ids=lambda each: each.name)
def test_no_field_has_another_number_or_type(old: Descriptor) -> None:
    fields = _class(old.name).DESCRIPTOR.fields_by_number
    for field in old.fields:
        assert field.number in fields, f"{old.name}.{field.name} is gone: a process of the release before sends it"
        now = fields[field.number]
        assert _shape(now) == _shape(field)
        may_be_absent = field.name in _MAY_BE_ABSENT.get(old.name, ())
        assert now.has_presence == (field.has_presence or may_be_absent)
        assert _is_in_oneof(now) == _is_in_oneof(field)


def _is_in_oneof(field: Any) -> bool:
    """Whether a field excludes others; an optional field has a oneof of its own."""
    return field.containing_oneof is not None and len(field.containing_oneof.fields) > 1


def _shape(field: Any) -> tuple[object, ...]:
    of_message = field.message_type.full_name if field.message_type else ""
    return field.name, field.type, field.is_repeated, of_message

"""Opens gRPC channels between Tandem's processes."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.calls import TracedChannel
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.certificates.names import Identity, Role, is_id
from tandem_runtime.either_channel import EitherChannel
from tandem_runtime.message_sizes import LARGEST
from tandem_runtime.renewed_channel import RenewedChannel

ERROR_METADATA = "tandem-error-bin"

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", LARGEST.request_bytes),
    ("grpc.max_receive_message_length", LARGEST.reply_bytes),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share a connection and its flow control
    ("grpc.enable_http_proxy", 0),  # http_proxy is for traffic that leaves the fleet
]


def open_channel(
    address: str,
    member: FleetMember | None = None,
    expect: Identity | Role | None = None,
    most_unread_bytes: int | None = None,
) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port, unix:PATH, dns:///name:port); it connects with its first call.

    With a `member` the connection is encrypted, shows this process's certificate and takes an answer of `expect` only:
    a process, or any process of a role where the id is not known. Without one it is plain text, for a fleet of one
    machine or of the release before. While the member's `plaintext` allows it, a server of release 0.2 is called in
    plain text where the id is not known.

    `most_unread_bytes`: what a stream may have on its way to a reader that reads none of it; None: as gRPC finds best,
    which may be megabytes, and so seconds of small messages.

    Calls carry the current trace and request id, and raise `TandemError`s instead of `grpc.aio.AioRpcError`. A unary
    call without a timeout gets one of `tandem_runtime.calls.DEFAULT_TIMEOUT_SECONDS`.
    """
    options = _OPTIONS
    if most_unread_bytes is not None:
        options = [*_OPTIONS, ("grpc.http2.lookahead_bytes", most_unread_bytes), ("grpc.http2.bdp_probe", 0)]
    if member is None:
        return TracedChannel(grpc.aio.insecure_channel(address, options=options), call_error)
    assert expect is not None, "with certificates, a channel expects a process or a role"
    if not isinstance(expect, Identity) and member.plaintext.is_allowed:
        return TracedChannel(EitherChannel(address, member, expect, options), call_error)
    return TracedChannel(RenewedChannel(address, member, expect, options), call_error)


def open_worker_channel(
    info: pb.WorkerInfo, member: FleetMember | None, most_unread_bytes: int | None = None
) -> grpc.aio.Channel:
    """Return a channel to the server of a registered worker or KV service, which must prove the registered id.

    `most_unread_bytes`: as in `open_channel`.

    With a member, a worker that has registered without a certificate is called in plain text while the member's
    `plaintext` allows it; then Unavailable is raised. No process without one can register under an id of certificates.
    """
    if member is not None and member.plaintext.is_allowed and not is_id(info.worker_id):
        return open_channel(info.address, most_unread_bytes=most_unread_bytes)
    expect = member.worker(info) if member is not None else None
    return open_channel(info.address, member, expect, most_unread_bytes)


def call_error(error: grpc.aio.AioRpcError) -> errors.TandemError:
    """Return the error that the server sent with a failed call, else the error nearest to the call's status."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA and isinstance(value, bytes):
            return _from_bytes(value) or _from_status(error)
    return _from_status(error)


def _from_bytes(value: bytes) -> errors.TandemError | None:
    try:
        return errors.from_proto(pb.ErrorDetail.FromString(value))
    except DecodeError:
        return None


def _from_status(error: grpc.aio.AioRpcError) -> errors.TandemError:
    kind = _BY_STATUS.get(error.code(), errors.InternalError)
    return kind(f"{error.code().name}: {error.details() or 'no details'}")


_BY_STATUS: dict[grpc.StatusCode, type[errors.TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.ABORTED: errors.Aborted,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.PeerUnauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
}

"""Defines every typed error, with its code and its gRPC and HTTP status.

TandemError
├── InvalidRequest          the caller's input is wrong
│   ├── ModelNotFound
│   ├── ContextTooLong
│   ├── Unsupported         in the protocol, not built
│   └── Unauthenticated
├── Overloaded              a bound is reached: try again later
│   └── Draining
├── FingerprintMismatch
├── StaleIncarnation
├── DeadlineExceeded
├── Cancelled               the caller left
├── Aborted                 we stopped it
├── Unavailable             cannot be reached
├── PeerUnauthenticated     the calling process has no valid certificate of this fleet
├── PermissionDenied        its role or id does not permit the call
├── KvNotFound
├── KvCorrupt
└── InternalError
"""

from __future__ import annotations

from typing import ClassVar

import grpc

from tandem.v1 import types_pb2 as pb


class TandemError(Exception):
    """An error with a code; its message names the thing, the value, the limit and the remedy."""

    code: ClassVar[pb.ErrorCode.ValueType] = pb.ERROR_CODE_INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds

    @property
    def grpc_status(self) -> grpc.StatusCode:
        return STATUSES[self.code][0]

    @property
    def http_status(self) -> int:
        return STATUSES[self.code][1]

    @property
    def log_text(self) -> str:
        """The text for logs: the message, but not that of a caller's mistake, which may quote the caller."""
        return "the caller's answer has the message" if isinstance(self, InvalidRequest) else self.message

    def to_proto(self) -> pb.ErrorDetail:
        retry_after_ms = 0 if self.retry_after_seconds is None else max(1, int(self.retry_after_seconds * 1000))
        return pb.ErrorDetail(code=self.code, message=self.message, field=self.field, retry_after_ms=retry_after_ms)


class InvalidRequest(TandemError):
    code = pb.ERROR_CODE_INVALID_REQUEST


class ModelNotFound(InvalidRequest):
    code = pb.ERROR_CODE_MODEL_NOT_FOUND


class ContextTooLong(InvalidRequest):
    code = pb.ERROR_CODE_CONTEXT_TOO_LONG


class Unsupported(InvalidRequest):
    code = pb.ERROR_CODE_UNSUPPORTED


class Unauthenticated(InvalidRequest):
    code = pb.ERROR_CODE_UNAUTHENTICATED


class Overloaded(TandemError):
    code = pb.ERROR_CODE_OVERLOADED


class Draining(Overloaded):
    code = pb.ERROR_CODE_DRAINING


class FingerprintMismatch(TandemError):
    code = pb.ERROR_CODE_FINGERPRINT_MISMATCH


class StaleIncarnation(TandemError):
    code = pb.ERROR_CODE_STALE_INCARNATION


class DeadlineExceeded(TandemError):
    code = pb.ERROR_CODE_DEADLINE_EXCEEDED


class Cancelled(TandemError):
    code = pb.ERROR_CODE_CANCELLED


class Aborted(TandemError):
    code = pb.ERROR_CODE_ABORTED


class Unavailable(TandemError):
    code = pb.ERROR_CODE_UNAVAILABLE


class PeerUnauthenticated(TandemError):
    code = pb.ERROR_CODE_PEER_UNAUTHENTICATED


class PermissionDenied(TandemError):
    code = pb.ERROR_CODE_PERMISSION_DENIED


class KvNotFound(TandemError):
    code = pb.ERROR_CODE_KV_NOT_FOUND


class KvCorrupt(TandemError):
    code = pb.ERROR_CODE_KV_CORRUPT


class InternalError(TandemError):
    code = pb.ERROR_CODE_INTERNAL


def note_work(error: BaseException) -> None:
    """Note that work was done, and is billed, before `error` ended the request: a repeated request does it again."""
    error.__dict__["has_work"] = True


def has_work(error: BaseException) -> bool:
    return bool(error.__dict__.get("has_work"))


STATUSES: dict[pb.ErrorCode.ValueType, tuple[grpc.StatusCode, int]] = {
    pb.ERROR_CODE_UNSPECIFIED: (grpc.StatusCode.UNKNOWN, 500),
    pb.ERROR_CODE_INVALID_REQUEST: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    pb.ERROR_CODE_MODEL_NOT_FOUND: (grpc.StatusCode.NOT_FOUND, 404),
    pb.ERROR_CODE_CONTEXT_TOO_LONG: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    pb.ERROR_CODE_UNSUPPORTED: (grpc.StatusCode.UNIMPLEMENTED, 400),
    pb.ERROR_CODE_UNAUTHENTICATED: (grpc.StatusCode.UNAUTHENTICATED, 401),
    pb.ERROR_CODE_OVERLOADED: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    pb.ERROR_CODE_DRAINING: (grpc.StatusCode.UNAVAILABLE, 503),
    pb.ERROR_CODE_FINGERPRINT_MISMATCH: (grpc.StatusCode.FAILED_PRECONDITION, 503),
    pb.ERROR_CODE_STALE_INCARNATION: (grpc.StatusCode.FAILED_PRECONDITION, 503),
    pb.ERROR_CODE_DEADLINE_EXCEEDED: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    pb.ERROR_CODE_CANCELLED: (grpc.StatusCode.CANCELLED, 499),
    pb.ERROR_CODE_ABORTED: (grpc.StatusCode.ABORTED, 500),
    pb.ERROR_CODE_UNAVAILABLE: (grpc.StatusCode.UNAVAILABLE, 503),
    pb.ERROR_CODE_KV_NOT_FOUND: (grpc.StatusCode.NOT_FOUND, 503),
    pb.ERROR_CODE_KV_CORRUPT: (grpc.StatusCode.DATA_LOSS, 500),
    pb.ERROR_CODE_INTERNAL: (grpc.StatusCode.INTERNAL, 500),
    # Between processes of the fleet only. A tenant whose request fails for it did nothing wrong: 503.
    pb.ERROR_CODE_PEER_UNAUTHENTICATED: (grpc.StatusCode.UNAUTHENTICATED, 503),
    pb.ERROR_CODE_PERMISSION_DENIED: (grpc.StatusCode.PERMISSION_DENIED, 503),
}


def from_proto(detail: pb.ErrorDetail) -> TandemError:
    """Return the exception that `detail` describes; an unknown code becomes InternalError."""
    error = _BY_CODE.get(detail.code, InternalError)(detail.message, field=detail.field)
    error.retry_after_seconds = detail.retry_after_ms / 1000 if detail.retry_after_ms else None
    return error


def _tree(root: type[TandemError]) -> list[type[TandemError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {kind.code: kind for kind in _tree(TandemError) if kind is not TandemError}

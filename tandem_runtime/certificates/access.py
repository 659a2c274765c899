"""States which roles may call each method, and refuses all other calls.

One table for the whole fleet: a method without a row is refused. The caller's role and id come from its certificate,
which TLS has verified; `caller` gives them to handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc

from tandem_runtime.certificates.membership import WORKER_ROLES, FleetMember
from tandem_runtime.certificates.names import ROLES, Identity, Role, is_id
from tandem_runtime.certificates.peers import Peer
from tandem_runtime.errors import InternalError, PermissionDenied, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_MAX_LOGGED = 1024

Claim = Callable[[Any], "str | None"]
"""Returns the worker id that a request claims for its sender; None: it claims none."""


@dataclass(frozen=True)
class Rule:
    """Who may call a method. `claims_id` and `claims_role`: what a request says of its sender must be true.

    Of a stream, each request is checked as the handler reads it.
    """

    roles: frozenset[Role]
    claims_id: Claim | None = None
    claims_role: Callable[[Any], int] | None = None


def _only(*roles: Role) -> Rule:
    return Rule(frozenset(roles))


_WORKERS: tuple[Role, ...] = ("prefill", "decode", "encode")
_REPORTERS = frozenset[Role]((*_WORKERS, "kv"))
_ANYBODY = Rule(frozenset(ROLES))
_OPERATORS = _only("gateway", "supervisor")

RULES: dict[str, Rule] = {
    # A gateway serves those that report to it. Each reports itself only.
    "/tandem.v1.ControlPlaneService/Register": Rule(
        _REPORTERS, lambda request: str(request.info.worker_id), lambda request: int(request.info.role)
    ),
    "/tandem.v1.ControlPlaneService/Heartbeat": Rule(_REPORTERS, lambda request: str(request.worker_id)),
    "/tandem.v1.ControlPlaneService/Heartbeats": Rule(_REPORTERS, lambda request: str(request.worker_id)),
    "/tandem.v1.ControlPlaneService/Deregister": Rule(_REPORTERS, lambda request: str(request.worker_id)),
    "/tandem.v1.ControlPlaneService/ListWorkers": _OPERATORS,
    # A worker serves gateways. Attach carries prompts and answers: no worker may read another's.
    "/tandem.v1.WorkerService/Attach": _only("gateway"),
    "/tandem.v1.WorkerService/GetAsset": _only("gateway"),
    "/tandem.v1.WorkerService/Stats": _OPERATORS,
    "/tandem.v1.WorkerService/Tables": _only("gateway"),
    "/tandem.v1.WorkerService/Drain": _only("gateway"),
    "/tandem.v1.EncodeService/Encode": _only("gateway"),
    "/tandem.v1.EncodeService/Grants": _only("gateway"),
    "/tandem.v1.EncodeService/GetAsset": _only("gateway"),
    "/tandem.v1.EncodeService/Stats": _OPERATORS,
    "/tandem.v1.EncodeService/Drain": _only("gateway"),
    # A KV service serves the workers of its host, the gateways, which end handles, and other KV services.
    "/tandem.v1.KvTransferService/Reserve": _only("prefill", "encode"),
    "/tandem.v1.KvTransferService/Seal": _only("prefill", "encode"),
    "/tandem.v1.KvTransferService/SealStream": _only("prefill", "encode"),
    "/tandem.v1.KvTransferService/Watch": _only("decode", "kv"),
    "/tandem.v1.KvTransferService/Acknowledge": _only("decode", "kv"),
    "/tandem.v1.KvTransferService/Renew": _only("prefill", "decode", "encode", "kv"),
    "/tandem.v1.KvTransferService/Release": _only("prefill", "decode", "encode", "kv", "gateway"),
    "/tandem.v1.KvTransferService/Abort": _only("prefill", "decode", "encode", "kv", "gateway"),
    "/tandem.v1.KvTransferService/Read": _only("decode", "kv"),
    "/tandem.v1.KvTransferService/Own": _only("prefill", "decode", "encode"),
    "/tandem.v1.KvTransferService/Publish": _only("prefill", "decode", "encode"),
    "/tandem.v1.KvTransferService/Load": _only("prefill", "decode"),
    "/tandem.v1.KvTransferService/Unload": _only("prefill", "decode"),
    "/tandem.v1.KvTransferService/BlockEvents": _only("gateway"),
    "/tandem.v1.KvTransferService/ReportPool": Rule(
        frozenset(("prefill", "decode")),
        lambda request: str(request.heartbeat.worker_id) if request.HasField("heartbeat") else None,
    ),
    "/tandem.v1.KvTransferService/ReadBlocks": _only("kv"),
    "/tandem.v1.KvTransferService/OpenLink": _only("kv"),
    "/tandem.v1.KvTransferService/Probe": _only("kv"),
    "/tandem.v1.KvTransferService/Stats": _OPERATORS,
    "/tandem.v1.KvTransferService/Tables": _only("gateway"),
    # Enrolment has a port of its own, where callers have no certificate.
    "/tandem.v1.EnrolmentService/Enrol": _only(),
    "/tandem.v1.EnrolmentService/Renew": _only(),
    # Health states no more than whether a process serves. A channel also uses it to show a renewed certificate.
    "/grpc.health.v1.Health/Check": _ANYBODY,
    "/grpc.health.v1.Health/List": _ANYBODY,
    "/grpc.health.v1.Health/Watch": _ANYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}


def caller() -> Peer:
    """Return who calls, inside a handler of a server with certificates. Raises LookupError in plain text."""
    return _caller.get()


def reason_of_cut() -> TandemError | None:
    """Return why the call of this task was cut by `Peers`; None if it was not."""
    cut = _cut.get()
    return cut.reason if cut is not None else None


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Checks each call against the table, and registers it with the member's peers until it ends.

    Comes after the ErrorInterceptor, which turns the refusals into statuses.
    A caller without a certificate is let in while the member's `plaintext` allows it; `shared_port` has more.
    """

    def __init__(self, member: FleetMember) -> None:
        self._member = member
        self._logged: set[tuple[str, Identity]] = set()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        return handler and self._checked(handler, handler_call_details.method)

    def _checked(self, handler: Any, method: str) -> Any:
        """Return a handler that checks and then returns what the handler returns: no layer around each answer."""
        kind = _KINDS[handler.request_streaming, handler.response_streaming]
        inner = getattr(handler, kind)
        is_stream = handler.request_streaming
        has_claims = is_stream and method in RULES and RULES[method].claims_id is not None

        def answer(request: Any, context: Any) -> Any:
            self._admit(method, None if is_stream else request, context)
            return inner(_of_sender(method, request) if has_claims else request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _admit(self, method: str, request: Any, context: Any) -> None:
        certificate = _certificate(context)
        if certificate is None and self._member.plaintext.is_allowed:
            check_plaintext(method, request)
            _in_plaintext.set(True)
            return
        peer = self._member.peers.admit(certificate)
        try:
            check(method, peer.identity, request)
        except PermissionDenied as error:
            self._log(method, peer.identity, error)
            raise
        _caller.set(peer)
        cut = _Cut(asyncio.current_task())
        _cut.set(cut)
        opened = self._member.peers.accepted(peer.identity, cut)

        def ended(_: Any) -> None:
            opened.end()
            cut.forget()

        context.add_done_callback(ended)

    def _log(self, method: str, identity: Identity, error: PermissionDenied) -> None:
        """Log a refusal once for each caller and method: a process that asks for ever fills no disk."""
        if (method, identity) not in self._logged:
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add((method, identity))
            log.warning("call_refused", method=method, peer=str(identity), reason=error.message)


def check(method: str, identity: Identity, request: Any = None) -> None:
    """Raise PermissionDenied unless the table lets `identity` call `method` with `request` (None: a stream)."""
    rule = RULES.get(method)
    if rule is None:
        raise PermissionDenied(f"{method} has no row in the table of who may call what; add one to access.py")
    if identity.role not in rule.roles:
        allowed = " or ".join(sorted(rule.roles)) or "nobody"
        raise PermissionDenied(f"{method} may be called by {allowed}; the caller is a {identity.role}, {identity.id}")
    if request is not None:
        _check_claims(method, rule, identity, request)


def check_plaintext(method: str, request: Any = None) -> None:
    """Raise PermissionDenied unless a process of release 0.2, which has no certificate, calls `method` there.

    Nothing proves its role, so it may do what any process may. Ids of certificates are for those who have one.
    """
    rule = RULES.get(method)
    if rule is None or not rule.roles or rule is _OPERATORS:
        raise PermissionDenied(f"{method} may not be called in plain text; call it with a certificate")
    claimed = rule.claims_id(request) if request is not None and rule.claims_id is not None else None
    if claimed is not None and is_id(claimed):
        raise PermissionDenied(
            f"worker id {claimed} is that of a certificate, and the call came in plain text; call over TLS, or give "
            "the process another --worker-id",
            field="worker_id",
        )


def is_in_plaintext() -> bool:
    """Return whether the caller, inside a handler of a server with certificates, is a process of release 0.2."""
    return _in_plaintext.get()


async def _of_sender(method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the requests of a stream; raise PermissionDenied for one that claims to be another's."""
    async for request in requests:
        if is_in_plaintext():
            check_plaintext(method, request)
        else:
            _check_claims(method, RULES[method], caller().identity, request)
        yield request


def _check_claims(method: str, rule: Rule, identity: Identity, request: Any) -> None:
    claimed = rule.claims_id(request) if rule.claims_id is not None else None
    if claimed is not None and claimed != identity.id:
        raise PermissionDenied(
            f"{method} is for worker {claimed[:64]!r}; the caller is {identity}, and may name itself only",
            field="worker_id",
        )
    if rule.claims_role is not None:
        claimed_role = WORKER_ROLES.get(rule.claims_role(request))  # type: ignore[call-overload]
        if claimed_role != identity.role:
            raise PermissionDenied(
                f"{method} names the role {claimed_role}; the certificate of {identity} says {identity.role}",
                field="role",
            )


class _Cut:
    """Ends one call: cancels its task, and keeps the reason for the ErrorInterceptor."""

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        assert task is not None, "gRPC runs each call in a task"
        self._task: asyncio.Task[Any] | None = task
        self.reason: TandemError | None = None

    def __call__(self, reason: TandemError) -> None:
        self.reason = reason
        if self._task is not None:
            self._task.cancel()
        self.forget()

    def forget(self) -> None:
        """Break the cycle of task, its context and this: gRPC ends a call on the wire when its last reference goes."""
        self._task = None


_caller: ContextVar[Peer] = ContextVar("tandem_caller")
_cut: ContextVar[_Cut | None] = ContextVar("tandem_cut", default=None)
_in_plaintext: ContextVar[bool] = ContextVar("tandem_in_plaintext", default=False)

_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def _certificate(context: Any) -> bytes | None:
    """Return the PEM of the caller's certificate; raises InternalError if gRPC gives more than one."""
    certificates = context.auth_context().get("x509_pem_cert", ())
    if len(certificates) > 1:
        raise InternalError(f"gRPC names {len(certificates)} certificates of one caller")
    return bytes(certificates[0]) if certificates else None

"""Takes regions from workers and hands them out to readers. `tandem_runtime.kv.regions` lists the messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tandem_runtime.errors import InvalidRequest, TandemError, Unauthenticated, Unsupported
from tandem_runtime.kv.packets import PacketSocket, close_all
from tandem_runtime.kv.regions import RegionGrant, RegionOffer, region_kind, region_name, shortened
from tandem_runtime.log import get_logger
from tandem_runtime.peer_credentials import check_own_user
from tandem_runtime.tasks import TaskSet, supervised

log = get_logger(__name__)

_BACKLOG = 64
_ACCEPT_PAUSE_SECONDS = 0.5
_ACCEPT_REMEDY = "allow the KV service more open files (ulimit -n, LimitNOFILE=)"


class RegionKeeper(Protocol):
    """The KV service's table of regions. Called on the event loop."""

    def take(self, offer: RegionOffer, fd: int, connection: object, memory_fd: int | None = None) -> None:
        """Keep a region. Takes ownership of descriptors, also when it raises. `connection` identifies the lender.

        `memory_fd` comes with offers of kind "device", whose `fd` has the generations alone.
        """

    def owner_gone(self, region_id: str, connection: object) -> None:
        """The connection that lent the region has ended."""

    def grant(self, region_id: str) -> RegionGrant:
        """Return descriptors of a region, of shared memory read-only; raises KvNotFound."""


class RegionServer:
    """Listens on a Unix socket; `close` removes it."""

    def __init__(self, path: Path, keeper: RegionKeeper) -> None:
        self.path = path
        self._keeper = keeper
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Listen. The socket is named only after it listens: a starting service removes sockets that refuse."""
        unnamed = self.path.with_suffix(".bind")
        unnamed.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(str(unnamed))
        unnamed.chmod(0o600)
        self._listener.listen(_BACKLOG)
        unnamed.replace(self.path)
        self._tasks.spawn(supervised("region-connections", self._accept, longest_pause_seconds=1.0))

    async def close(self) -> None:
        """Stop listening, close all connections and remove the socket."""
        await self._tasks.cancel()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors or memory: workers try again
                log.warning("kv_region_connection_not_accepted", error=str(error), remedy=_ACCEPT_REMEDY)
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            try:
                peer = check_own_user(sock, str(self.path))
            except (Unauthenticated, OSError) as error:
                log.warning("kv_region_peer_refused", reason=str(error))
                sock.close()
                continue
            log.debug("kv_region_peer_accepted", pid=peer.pid, uid=peer.uid)
            self._tasks.spawn(self._serve(PacketSocket(sock)))

    async def _serve(self, connection: PacketSocket) -> None:
        lent: set[str] = set()
        try:
            with contextlib.suppress(TandemError):  # the peer has left, or has received the error
                while (received := await connection.receive()) is not None:
                    await self._answer(connection, *received, lent)
        finally:
            connection.close()
            for region_id in lent:
                self._keeper.owner_gone(region_id, connection)

    async def _answer(
        self, connection: PacketSocket, message: dict[str, Any], fds: Sequence[int], lent: set[str]
    ) -> None:
        operation = shortened(message.get("op"))
        try:
            reply, reply_fds = self._handle(connection, message, fds, lent)
        except TandemError as error:
            log.warning("kv_region_refused", op=operation, reason=error.message)
            refusal = {"code": int(error.code), "message": error.message, "field": error.field}
            await connection.send({"error": refusal})
            return
        try:
            await connection.send(reply, *reply_fds)
        finally:
            close_all(reply_fds)

    def _handle(
        self, connection: PacketSocket, message: dict[str, Any], fds: Sequence[int], lent: set[str]
    ) -> tuple[dict[str, Any], Sequence[int]]:
        operation = message.pop("op", None)
        if operation == "offer" and fds:
            offer = _offer(message, fds)
            self._keeper.take(offer, fds[0], connection, *fds[1:])
            lent.add(offer.region_id)
            return {"ok": True}, ()
        close_all(fds)
        if operation == "fetch":
            grant = self._keeper.grant(region_name(message, "region_id"))
            try:
                _check_kind(message, grant)
            except TandemError:
                close_all(grant.fds)
                raise
            return {"ok": True, **grant.message}, grant.fds
        raise InvalidRequest(
            f"the region socket knows offer (with a descriptor) and fetch, not {shortened(operation)}", field="op"
        )


def _offer(message: dict[str, Any], fds: Sequence[int]) -> RegionOffer:
    try:
        offer = RegionOffer.parse(message)
        num_fds = 2 if offer.kind == "device" else 1
        if len(fds) != num_fds:
            raise InvalidRequest(f"a region of kind {offer.kind} comes with {num_fds} descriptors, not {len(fds)}")
    except InvalidRequest:
        close_all(fds)
        raise
    return offer


def _check_kind(message: dict[str, Any], grant: RegionGrant) -> None:
    """Refuse a reader that asks for another kind of memory than the region has; a reader of release 0.2 asks so."""
    if (kind := region_kind(message)) != grant.kind:
        region = shortened(message["region_id"])
        raise Unsupported(
            f"region {region} is in MEMORY_KIND_{grant.kind.upper()}, the reader maps MEMORY_KIND_{kind.upper()}; "
            f"start the prefill worker with --kv-region {kind}",
            field="kind",
        )

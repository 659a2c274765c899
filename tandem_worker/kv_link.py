"""The worker's connection to the KV service of its host.

Follows the service through restarts, lends it the region of this worker's pool, and fetches regions of other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.kv.client import KvClient, expected_service
from tandem_runtime.kv.known_blocks import REGION_ID, KnownBlocks
from tandem_runtime.kv.packets import close_all
from tandem_runtime.kv.regions import RegionClient, RegionGrant, RegionKind
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_POLL_SECONDS = 0.25
_HIDDEN_SECONDS = 10.0
"""Seconds that the service's socket may be out of sight before a worker that needs it ends."""
_START_ONE = "start `python -m kv_transfer_svc` on this host; if one runs, give both the same --host-id"


@dataclass(frozen=True)
class LentPool:
    """The region in which others read this worker's blocks; its descriptors stay open until `KvLink.close`."""

    region_id: str
    num_bytes: int
    num_slots: int
    bytes_per_slot: int
    generations_offset: int
    fd: int
    memory_fd: int | None = None
    """Of a pool in device memory."""


def lent_pool(ready: messages.Ready, fd: int, memory_fd: int | None = None) -> LentPool:
    """Return the engine's region for `KvLink.lend`; the link owns the descriptors from then on."""
    sizes = ready.region_bytes, ready.num_slots, ready.bytes_per_slot, ready.generations_offset
    return LentPool(ready.region_id, *sizes, fd, memory_fd)


def memory_kind(kind: messages.RegionKind) -> pb.MemoryKind.ValueType:
    """Return the kind of extents in an engine's region."""
    return pb.MEMORY_KIND_HOST if kind == "host" else pb.MEMORY_KIND_DEVICE


@dataclass(frozen=True)
class _Connection:
    """The connection to one incarnation of the KV service."""

    service: cp.KvServiceAddress
    client: KvClient
    regions: RegionClient
    known: KnownBlocks | None
    lent: LentPool | None

    async def close(self) -> None:
        if self.known is not None:
            self.known.close()
        await self.client.close()
        await self.regions.close()


class KvLink:
    """Follows the KV service of this host through restarts, and lends our region to each incarnation of it."""

    def __init__(self, incarnation: str, lease_seconds: float, member: FleetMember | None = None) -> None:
        self._incarnation = incarnation
        self._member = member
        self._lease_seconds = lease_seconds
        self._connection: _Connection | None = None
        self._pool: LentPool | None = None
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._failure = ""
        self._hidden_since: float | None = None
        self._refusal: InvalidRequest | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        return self._connection.service.address if self._connection else ""

    def follow(
        self, lookup: Callable[[], cp.KvServiceAddress | None], on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Start following the KV service that `lookup` returns; `on_change` is called when `address` changes."""
        self._on_change = on_change
        self._follower = asyncio.create_task(self._follow(lookup))

    def lend(self, pool: LentPool) -> None:
        """Lend our region to the KV service, now and after each change of service."""
        self._pool = pool
        self._wake.set()

    async def wait_lent(self) -> None:
        """Return once a KV service has accepted the region passed to `lend`.

        Raises InvalidRequest if the service's socket is not in this process's file system.
        """

        def is_lent() -> bool:
            return self._pool is not None and self._lent is self._pool

        def is_decided() -> bool:
            return is_lent() or self._refusal is not None

        async with self._changed:
            try:
                async with asyncio.timeout(_HIDDEN_SECONDS):
                    await self._changed.wait_for(is_decided)
            except TimeoutError:  # services start in any order
                log.warning("kv_service_awaited", seconds=_HIDDEN_SECONDS, error=self._failure, remedy=_START_ONE)
                await self._changed.wait_for(is_decided)
            if self._refusal is not None and not is_lent():
                raise self._refusal

    def client(self) -> KvClient:
        """Return the client of the current KV service; raises Unavailable if there is none."""
        if self._connection is None:
            raise Unavailable("no KV service is known for this host; start one with `python -m kv_transfer_svc`")
        return self._connection.client

    async def release_at_holder(self, handle: pb.KvHandle, reader_id: str, seconds_left: float) -> None:
        """Release a handle at the KV service that holds it, past our own one; raises Unavailable if ours holds it."""
        address, id = handle.holder_address, handle.holder_id
        if address == self.address:
            raise Unavailable(f"the KV service at {address} holds the handle, and does not answer")
        expect = expected_service(self._member, id, address)
        holder = KvClient(address, self._incarnation, member=self._member, expect=expect)
        try:
            await holder.release(handle, reader_id, seconds_left)
        finally:
            await holder.close()

    async def wait_client(self) -> tuple[KvClient, str]:
        """Wait for a KV service; return its client and its incarnation."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._connection is not None)
            assert self._connection is not None, "waited for above"
            return self._connection.client, self._connection.service.incarnation

    async def wait_gone(self, client: KvClient) -> None:
        """Return once `client` is no longer the current client."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._connection is None or self._connection.client is not client)

    async def fetch_region(self, region_id: str, kind: RegionKind = "host") -> RegionGrant:
        """Return a region that was lent to the KV service; raises Unavailable, KvNotFound or Unsupported."""
        if self._connection is None:
            raise Unavailable("no KV service is known for this host, so its regions cannot be mapped")
        return await self._connection.regions.fetch(region_id, kind)

    def may_have(self, layout_digest: bytes, block_hash: bytes) -> bool:
        """Return False if the host's store had no such block a moment ago, so that a lookup is not worth its time."""
        known = self._connection.known if self._connection else None
        return known is None or known.may_have(layout_digest, block_hash)

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self.disconnect()
        pool, self._pool = self._pool, None
        if pool is not None:
            close_all((pool.fd,) if pool.memory_fd is None else (pool.fd, pool.memory_fd))

    @property
    def _lent(self) -> LentPool | None:
        return self._connection.lent if self._connection else None

    async def _follow(self, lookup: Callable[[], cp.KvServiceAddress | None]) -> None:
        last_named = time.monotonic()
        while True:
            self._wake.clear()
            found = lookup()
            try:
                if found is not None:
                    last_named = time.monotonic()
                    if self._is_other(found) or self._lent is not self._pool:
                        await self._connect(found)
                    self._failure, self._hidden_since = "", None
                elif self._connection is not None and time.monotonic() - last_named > self._lease_seconds:
                    await self.disconnect()
            except (TandemError, OSError) as error:
                await self._note_failure(found, str(error))
            except Exception:  # without this task no KV block would move again
                log.exception("kv_link_failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _POLL_SECONDS)

    async def _note_failure(self, found: cp.KvServiceAddress | None, error: str) -> None:
        """Log each new failure once, and refuse to wait for ever for a socket that this process cannot see."""
        if error != self._failure:
            self._failure = error
            log.warning("kv_service_unreachable", address=found.address if found else "", error=error)
        if found is None or os.path.exists(found.socket):  # noqa: ASYNC240, PTH110 - one look at a local folder
            self._hidden_since = None
            return
        now = time.monotonic()
        self._hidden_since = self._hidden_since or now
        if now - self._hidden_since >= _HIDDEN_SECONDS:
            async with self._changed:
                self._refusal = InvalidRequest(
                    f"the KV service of this host, at {found.address}, has its socket at {found.socket}, which this "
                    "process cannot see: in containers, mount one folder into both and name it in TANDEM_RUNTIME_DIR, "
                    "or start a KV service beside this worker and give both a --host-id of their own"
                )
                self._changed.notify_all()

    def _is_other(self, found: cp.KvServiceAddress) -> bool:
        return self._connection is None or found.incarnation != self._connection.service.incarnation

    async def _connect(self, found: cp.KvServiceAddress) -> None:
        await self.disconnect()
        regions = RegionClient(found.socket)
        pool = self._pool
        try:
            if pool is not None:
                await self._lend(regions, pool)
            known = await _known_blocks(regions)
            client = self._client_of(found)
        except BaseException:
            await regions.close()
            raise
        await self._set_connection(_Connection(found, client, regions, known, pool))
        self._on_change()
        log.info("kv_service_found", address=found.address, incarnation=found.incarnation, lent=pool is not None)

    def _client_of(self, found: cp.KvServiceAddress) -> KvClient:
        expect = expected_service(self._member, found.worker_id, found.address)
        lease_seconds = self._lease_seconds
        return KvClient(
            found.address, self._incarnation, lease_seconds=lease_seconds, member=self._member, expect=expect
        )

    async def _lend(self, regions: RegionClient, pool: LentPool) -> None:
        await regions.offer(
            pool.region_id,
            self._incarnation,
            pool.num_bytes,
            pool.num_slots,
            pool.bytes_per_slot,
            pool.generations_offset,
            pool.fd,
            pool.memory_fd,
        )

    async def disconnect(self) -> None:
        connection = self._connection
        await self._set_connection(None)
        if connection is not None:
            self._on_change()
            await connection.close()

    async def _set_connection(self, connection: _Connection | None) -> None:
        async with self._changed:
            self._connection = connection
            self._changed.notify_all()


async def _known_blocks(regions: RegionClient) -> KnownBlocks | None:
    """Return the table of blocks in the service's store; None if there is none: each lookup is then a call."""
    try:
        grant = await regions.fetch(REGION_ID)
    except TandemError as error:  # KvNotFound: the service has no store
        log.info("kv_known_blocks_not_mapped", reason=error.message)
        return None
    try:
        return KnownBlocks.map_read_only(grant.fd, grant.num_slots, grant.generations_offset)
    except (TandemError, OSError, ValueError) as error:  # a call for each lookup is slower, nothing worse
        log.warning("kv_known_blocks_not_mapped", reason=str(error))
        return None
    finally:
        os.close(grant.fd)


@contextlib.contextmanager
def lost_is_unavailable() -> Iterator[None]:
    """Raise Unavailable if the client is closed during a call because its KV service was lost.

    gRPC cancels the calls of a closed channel, and with them the waiting task, as if the task's owner had cancelled it.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("the KV service was lost during a call") from None
    except grpc.aio.UsageError as error:
        raise Unavailable(f"the KV service was lost before a call: {error}") from error

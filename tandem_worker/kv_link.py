"""The worker's connection to the KV service of its host: follows restarts, lends the pool's region, fetches others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from tandem.v1 import control_plane_pb2 as cp
from tandem_engine import messages
from tandem_runtime.errors import TandemError, Unavailable
from tandem_runtime.kv.client import KvClient
from tandem_runtime.kv.known_blocks import REGION_ID, KnownBlocks
from tandem_runtime.kv.regions import RegionClient, RegionGrant
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class LentPool:
    """The region of this worker's pool, for the KV service; `fd` stays open as long as the worker lives."""

    region_id: str
    num_bytes: int
    num_slots: int
    bytes_per_slot: int
    generations_offset: int
    fd: int


def lent_pool(ready: messages.Ready, fd: int) -> LentPool:
    """Return the engine's pool for `KvLink.lend`; the link owns `fd` from then on."""
    num_bytes = ready.layout.bytes_per_block
    return LentPool(ready.region_id, ready.region_bytes, ready.num_blocks, num_bytes, ready.generations_offset, fd)


class KvLink:
    """Follows the KV service of this host through restarts, and lends our region to each incarnation of it."""

    def __init__(self, incarnation: str, lease_seconds: float) -> None:
        self._incarnation = incarnation
        self._lease_seconds = lease_seconds
        self._current: cp.KvServiceAddress | None = None
        self._client: KvClient | None = None
        self._regions: RegionClient | None = None
        self._known: KnownBlocks | None = None
        self._offer: LentPool | None = None
        self._lent: LentPool | None = None
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        return self._current.address if self._current else ""

    def follow(
        self, lookup: Callable[[], cp.KvServiceAddress | None], on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Start following the KV service that `lookup` returns; `on_change` is called when `address` changes."""
        self._on_change = on_change
        self._follower = asyncio.create_task(self._follow(lookup))

    def lend(self, offer: LentPool) -> None:
        """Offer our region to the KV service, now and after each change of service."""
        self._offer = offer
        self._wake.set()

    async def wait_lent(self) -> None:
        """Return once a KV service has accepted the region passed to `lend`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._offer is not None and self._lent is self._offer)

    def client(self) -> KvClient:
        """Return the client of the current KV service; raises Unavailable if there is none."""
        if self._client is None:
            raise Unavailable("no KV service is known for this host; start one with `python -m kv_transfer_svc`")
        return self._client

    async def wait_client(self) -> tuple[KvClient, str]:
        """Wait for a KV service; return its client and its incarnation."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._client is not None)
            assert self._client is not None and self._current is not None, "both are set together"
            return self._client, self._current.incarnation

    async def wait_gone(self, client: KvClient) -> None:
        """Return once `client` is no longer the current client."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._client is not client)

    async def fetch_region(self, region_id: str) -> RegionGrant:
        """Return a region that was lent to the KV service; raises Unavailable or KvNotFound."""
        if self._regions is None:
            raise Unavailable("no KV service is known for this host, so its regions cannot be mapped")
        return await self._regions.fetch(region_id)

    def may_have(self, layout_digest: bytes, block_hash: bytes) -> bool:
        """Return False if the host's store had no such block a moment ago, so that a lookup is not worth its time."""
        return self._known is None or self._known.may_have(layout_digest, block_hash)

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self.disconnect()
        offer, self._offer = self._offer, None
        if offer is not None:
            os.close(offer.fd)

    async def _follow(self, lookup: Callable[[], cp.KvServiceAddress | None]) -> None:
        last_named = time.monotonic()
        while True:
            self._wake.clear()
            found = lookup()
            try:
                if found is not None:
                    last_named = time.monotonic()
                    if self._is_other(found) or self._lent is not self._offer:
                        await self._connect(found)
                elif self._client is not None and time.monotonic() - last_named > self._lease_seconds:
                    await self.disconnect()
            except (TandemError, OSError) as error:
                log.warning("kv_service_unreachable", address=found.address if found else "", error=str(error))
            except Exception:  # without this task no KV block would move again
                log.exception("kv_link_failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _POLL_SECONDS)

    def _is_other(self, found: cp.KvServiceAddress) -> bool:
        return self._current is None or found.incarnation != self._current.incarnation

    async def _connect(self, found: cp.KvServiceAddress) -> None:
        await self.disconnect()
        regions = RegionClient(found.socket)
        offer = self._offer
        try:
            if offer is not None:
                await self._lend(regions, offer)
            known = await _known_blocks(regions)
        except BaseException:
            await regions.close()
            raise
        client = KvClient(found.address, self._incarnation, lease_seconds=self._lease_seconds)
        async with self._changed:
            self._current, self._regions, self._client, self._lent = found, regions, client, offer
            self._known = known
            self._changed.notify_all()
        self._on_change()
        log.info("kv_service_found", address=found.address, incarnation=found.incarnation, lent=offer is not None)

    async def _lend(self, regions: RegionClient, offer: LentPool) -> None:
        await regions.offer(
            offer.region_id,
            self._incarnation,
            offer.num_bytes,
            offer.num_slots,
            offer.bytes_per_slot,
            offer.generations_offset,
            offer.fd,
        )

    async def disconnect(self) -> None:
        client, regions, known = self._client, self._regions, self._known
        async with self._changed:
            self._current, self._client, self._regions, self._lent = None, None, None, None
            self._known = None
            self._changed.notify_all()
        if known is not None:
            known.close()
        if client is not None:
            self._on_change()
            await client.close()
        if regions is not None:
            await regions.close()


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

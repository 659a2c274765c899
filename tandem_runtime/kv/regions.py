"""Lends a worker's region to the KV service of its host, and fetches regions for readers.

    offer {region_id, incarnation, sizes} + descriptor  ->  {ok}; the end of the connection is the end of the owner
    fetch {region_id}                                   ->  {ok, sizes} + a read-only descriptor

Both use the service's Unix socket, which only its user can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.errors import TandemError, Unavailable
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class RegionOffer:
    """Describes an owner's region; slot i of its pool lies at `i * bytes_per_slot`."""

    region_id: str
    incarnation: str
    num_bytes: int
    """The whole region, generation table included."""
    num_slots: int
    bytes_per_slot: int
    generations_offset: int


@dataclass(frozen=True)
class RegionGrant:
    """A region to map read-only. The receiver closes the descriptor."""

    fd: int
    num_bytes: int
    num_slots: int
    generations_offset: int


class RegionClient:
    """The worker's side: offers its own region as long as it lives, and fetches the regions of others.

    Offers survive a restart of the KV service: when the connection ends, the region is offered again at `socket_path`.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._offers: dict[str, asyncio.Task[None]] = {}

    async def offer(
        self,
        region_id: str,
        incarnation: str,
        num_bytes: int,
        num_slots: int,
        bytes_per_slot: int,
        generations_offset: int,
        fd: int,
    ) -> None:
        """Lend a region; returns once the service has it. `fd` must stay open until `close`.

        Raises Unavailable if no service answers, or the service's refusal; the region is then not offered.
        """
        offer = RegionOffer(region_id, incarnation, num_bytes, num_slots, bytes_per_slot, generations_offset)
        connection = await self._offer_once(offer, fd)
        await self._withdraw(region_id)
        self._offers[region_id] = asyncio.create_task(self._keep_offered(connection, offer, fd))

    async def fetch(self, region_id: str) -> RegionGrant:
        """Return another worker's region; raises KvNotFound if the service does not hold it."""
        connection = await PacketSocket.connect(self._socket_path)
        try:
            answer, fd = await _ask(connection, {"op": "fetch", "region_id": region_id})
        finally:
            connection.close()
        if fd is None:
            raise Unavailable(f"the KV service sent no descriptor for region {region_id}")
        return RegionGrant(fd, answer["num_bytes"], answer["num_slots"], answer["generations_offset"])

    async def move(self, socket_path: str) -> None:
        """Offer the regions at another socket, that of the host's new KV service."""
        self._socket_path = socket_path

    async def close(self) -> None:
        """Withdraw the offers. The service then treats this owner as dead."""
        for region_id in list(self._offers):
            await self._withdraw(region_id)

    async def _withdraw(self, region_id: str) -> None:
        task = self._offers.pop(region_id, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep_offered(self, connection: PacketSocket, offer: RegionOffer, fd: int) -> None:
        while True:
            try:
                await _until_closed(connection)
            finally:
                connection.close()
            log.info("kv_region_connection_lost", region_id=offer.region_id)
            connection = await self._offer_again(offer, fd)
            log.info("kv_region_offered_again", region_id=offer.region_id)

    async def _offer_again(self, offer: RegionOffer, fd: int) -> PacketSocket:
        attempt = 0
        while True:
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1
            try:
                return await self._offer_once(offer, fd)
            except TandemError as error:
                log.debug("kv_region_not_offered", region_id=offer.region_id, reason=error.message)

    async def _offer_once(self, offer: RegionOffer, fd: int) -> PacketSocket:
        connection = await PacketSocket.connect(self._socket_path)
        try:
            _, returned = await _ask(connection, {"op": "offer", **vars(offer)}, fd)
        except BaseException:
            connection.close()
            raise
        if returned is not None:
            os.close(returned)
        return connection


async def _until_closed(connection: PacketSocket) -> None:
    """Wait for the end of the connection. The service sends nothing after its answer."""
    while (received := await connection.receive()) is not None:
        if received[1] is not None:
            os.close(received[1])


async def _ask(
    connection: PacketSocket, question: dict[str, Any], fd: int | None = None
) -> tuple[dict[str, Any], int | None]:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await connection.send(question, fd)
            received = await connection.receive()
    except TimeoutError as error:
        raise Unavailable(f"the KV service did not answer {question['op']!r} in {_ANSWER_SECONDS:g} s") from error
    if received is None:
        raise Unavailable(f"the KV service closed its socket instead of answering {question['op']!r}")
    answer, answer_fd = received
    if "error" in answer:
        refusal = answer["error"]
        raise errors.from_proto(
            pb.ErrorDetail(code=refusal["code"], message=refusal["message"], field=refusal["field"])
        )
    return answer, answer_fd

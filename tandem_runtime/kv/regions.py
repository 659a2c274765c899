"""Lends a worker's region to the KV service of its host, and fetches regions for readers.

    offer {region_id, incarnation, sizes} + descriptor  ->  {ok}; the end of the connection is the end of the owner
    fetch {region_id}                                   ->  {ok, sizes} + a read-only descriptor

Both use the service's Unix socket, which only its user can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.kv.packets import PacketSocket
from tandem_runtime.log import get_logger

log = get_logger(__name__)

MAX_NAME_CHARACTERS = 256
"""Of a region's id and of an incarnation. A refusal repeats them, and must fit into one packet."""
_MAX_NUMBER = 2**63 - 1
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

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> RegionOffer:
        """Return the offer that another process sent; raises InvalidRequest with the wrong field."""
        if unknown := message.keys() - cls.__annotations__.keys():
            raise InvalidRequest(
                f"an offer has the field {shortened(min(unknown))}; its fields are {', '.join(cls.__annotations__)}"
            )
        sizes = [_size(message, field) for field in ("num_bytes", "num_slots", "bytes_per_slot", "generations_offset")]
        return cls(region_name(message, "region_id"), region_name(message, "incarnation"), *sizes)


@dataclass(frozen=True)
class RegionGrant:
    """A region to map read-only. The receiver closes the descriptor."""

    fd: int
    num_bytes: int
    num_slots: int
    generations_offset: int


def region_name(message: Mapping[str, Any], field: str) -> str:
    """Return a name from a message of another process; raises InvalidRequest."""
    name = message.get(field)
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"{field} is {shortened(name)}; give a text of at most {MAX_NAME_CHARACTERS} characters", field=field
        )
    return name


def shortened(value: object) -> str:
    """Return a value of another process as text for an error message, at most about 100 characters."""
    return reprlib.repr(value)


def _size(message: Mapping[str, Any], field: str) -> int:
    number = message.get(field)
    if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
        raise InvalidRequest(f"{field} is {shortened(number)}; give an integer from 0 to {_MAX_NUMBER}", field=field)
    return number


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
            return await _fetch(connection, region_id)
        finally:
            connection.close()

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
            except Exception:  # the region must be offered again, whatever went wrong
                log.exception("kv_region_connection_broken", region_id=offer.region_id)
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
            except Exception:
                log.exception("kv_region_not_offered", region_id=offer.region_id)

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


async def _fetch(connection: PacketSocket, region_id: str) -> RegionGrant:
    answer, fd = await _ask(connection, {"op": "fetch", "region_id": region_id})
    if fd is None:
        raise Unavailable(f"the KV service sent no descriptor for region {region_id}")
    try:
        return RegionGrant(fd, *(_size(answer, field) for field in ("num_bytes", "num_slots", "generations_offset")))
    except InvalidRequest as error:
        os.close(fd)
        raise Unavailable(f"the KV service sent an invalid grant of region {region_id}: {error.message}") from error


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
        if answer_fd is not None:
            os.close(answer_fd)
        raise _refusal(answer["error"])
    return answer, answer_fd


def _refusal(refusal: Any) -> TandemError:
    try:
        detail = pb.ErrorDetail(code=refusal["code"], message=refusal["message"], field=refusal["field"])
    except (TypeError, KeyError, ValueError) as error:
        return Unavailable(f"the KV service sent a refusal that is not valid: {error!r}")
    return errors.from_proto(detail)

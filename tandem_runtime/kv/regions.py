"""Lends a worker's region to the KV service of its host, and fetches regions for readers.

    offer {region_id, incarnation, sizes} + descriptor  ->  {ok}; the end of the connection is the end of the owner
    fetch {region_id}                                   ->  {ok, sizes} + a read-only descriptor

A region in device memory has `kind` "device" in all three, and two descriptors: of its generations, which the service
maps and readers get read-only, and of the memory, which the service passes on unread. Regions in host memory have no
`kind`: their messages are those of release 0.2. A fetch that does not name the region's kind is refused.

Both use the service's Unix socket, which only its user can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tandem.v1 import types_pb2 as pb
from tandem_runtime import errors
from tandem_runtime.errors import InvalidRequest, TandemError, Unavailable
from tandem_runtime.kv.packets import PacketSocket, close_all
from tandem_runtime.log import get_logger

log = get_logger(__name__)

MAX_NAME_CHARACTERS = 256
"""Of a region's id and of an incarnation. A refusal repeats them, and must fit into one packet."""
_MAX_NUMBER = 2**63 - 1
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)


RegionKind = Literal["host", "device"]


@dataclass(frozen=True)
class RegionOffer:
    """Describes an owner's region; slot i of its pool lies at `i * bytes_per_slot`."""

    region_id: str
    incarnation: str
    num_bytes: int
    """The whole region, generation table included; of kind "device": the device memory, without it."""
    num_slots: int
    bytes_per_slot: int
    generations_offset: int
    kind: RegionKind = "host"

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> RegionOffer:
        """Return the offer that another process sent; raises InvalidRequest with the wrong field."""
        if unknown := message.keys() - cls.__annotations__.keys():
            raise InvalidRequest(
                f"an offer has the field {shortened(min(unknown))}; its fields are {', '.join(cls.__annotations__)}"
            )
        sizes = [_size(message, field) for field in ("num_bytes", "num_slots", "bytes_per_slot", "generations_offset")]
        num_bytes, num_slots, bytes_per_slot, offset = sizes
        names = region_name(message, "region_id"), region_name(message, "incarnation")
        return cls(*names, num_bytes, num_slots, bytes_per_slot, offset, region_kind(message))

    @property
    def message(self) -> dict[str, Any]:
        """The fields as they are sent."""
        return _without_host(vars(self))


@dataclass(frozen=True)
class RegionGrant:
    """A region to map read-only. The receiver closes the descriptors."""

    fd: int
    num_bytes: int
    num_slots: int
    generations_offset: int
    memory_fd: int | None = None
    """Of kind "device": the device memory. `fd` then has the generations alone."""

    @property
    def kind(self) -> RegionKind:
        return "host" if self.memory_fd is None else "device"

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.fd,) if self.memory_fd is None else (self.fd, self.memory_fd)

    @property
    def message(self) -> dict[str, Any]:
        """The fields as they are sent, beside the descriptors."""
        sizes = ("num_bytes", "num_slots", "generations_offset")
        return _without_host({**{name: getattr(self, name) for name in sizes}, "kind": self.kind})


def region_kind(message: Mapping[str, Any]) -> RegionKind:
    """Return the kind of region that a message of another process names; raises InvalidRequest."""
    kind = message.get("kind", "host")
    if kind not in ("host", "device"):
        raise InvalidRequest(f"kind is {shortened(kind)}; regions are of kind host or device", field="kind")
    return cast(RegionKind, kind)


def _without_host(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if (name, value) != ("kind", "host")}


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
        memory_fd: int | None = None,
    ) -> None:
        """Lend a region; returns once the service has it. The descriptors must stay open until `close`.

        `memory_fd`: the region is in device memory, and `fd` has its generations alone.

        Raises Unavailable if no service answers, or the service's refusal; the region is then not offered.
        """
        kind: RegionKind = "host" if memory_fd is None else "device"
        offer = RegionOffer(region_id, incarnation, num_bytes, num_slots, bytes_per_slot, generations_offset, kind)
        fds = (fd,) if memory_fd is None else (fd, memory_fd)
        connection = await self._offer_once(offer, fds)
        await self._withdraw(region_id)
        self._offers[region_id] = asyncio.create_task(self._keep_offered(connection, offer, fds))

    async def fetch(self, region_id: str, kind: RegionKind = "host") -> RegionGrant:
        """Return another worker's region; raises KvNotFound if the service does not hold it.

        Raises Unsupported for a region of another kind.
        """
        connection = await PacketSocket.connect(self._socket_path)
        try:
            return await _fetch(connection, region_id, kind)
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

    async def _keep_offered(self, connection: PacketSocket, offer: RegionOffer, fds: Sequence[int]) -> None:
        while True:
            try:
                await _until_closed(connection)
            except Exception:  # the region must be offered again, whatever went wrong
                log.exception("kv_region_connection_broken", region_id=offer.region_id)
            finally:
                connection.close()
            log.info("kv_region_connection_lost", region_id=offer.region_id)
            connection = await self._offer_again(offer, fds)
            log.info("kv_region_offered_again", region_id=offer.region_id)

    async def _offer_again(self, offer: RegionOffer, fds: Sequence[int]) -> PacketSocket:
        attempt = 0
        while True:
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1
            try:
                return await self._offer_once(offer, fds)
            except TandemError as error:
                log.debug("kv_region_not_offered", region_id=offer.region_id, reason=error.message)
            except Exception:
                log.exception("kv_region_not_offered", region_id=offer.region_id)

    async def _offer_once(self, offer: RegionOffer, fds: Sequence[int]) -> PacketSocket:
        connection = await PacketSocket.connect(self._socket_path)
        try:
            _, returned = await _ask(connection, {"op": "offer", **offer.message}, *fds)
        except BaseException:
            connection.close()
            raise
        close_all(returned)
        return connection


async def _fetch(connection: PacketSocket, region_id: str, kind: RegionKind = "host") -> RegionGrant:
    question = _without_host({"op": "fetch", "region_id": region_id, "kind": kind})
    answer, fds = await _ask(connection, question)
    try:
        if not fds:
            raise Unavailable(f"the KV service sent no descriptor for region {region_id}")
        if region_kind(answer) != kind or len(fds) != (2 if kind == "device" else 1):
            raise InvalidRequest(f"{len(fds)} descriptors of kind {shortened(answer.get('kind'))}, asked was {kind}")
        sizes = [_size(answer, field) for field in ("num_bytes", "num_slots", "generations_offset")]
    except InvalidRequest as error:
        close_all(fds)
        raise Unavailable(f"the KV service sent an invalid grant of region {region_id}: {error.message}") from error
    return RegionGrant(fds[0], *sizes, *fds[1:])


async def _until_closed(connection: PacketSocket) -> None:
    """Wait for the end of the connection. The service sends nothing after its answer."""
    while (received := await connection.receive()) is not None:
        close_all(received[1])


async def _ask(connection: PacketSocket, question: dict[str, Any], *fds: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await connection.send(question, *fds)
            received = await connection.receive()
    except TimeoutError as error:
        raise Unavailable(f"the KV service did not answer {question['op']!r} in {_ANSWER_SECONDS:g} s") from error
    if received is None:
        raise Unavailable(f"the KV service closed its socket instead of answering {question['op']!r}")
    answer, answer_fds = received
    if "error" in answer:
        close_all(answer_fds)
        raise _refusal(answer["error"])
    return answer, answer_fds


def _refusal(refusal: Any) -> TandemError:
    try:
        detail = pb.ErrorDetail(code=refusal["code"], message=refusal["message"], field=refusal["field"])
    except (TypeError, KeyError, ValueError) as error:
        return Unavailable(f"the KV service sent a refusal that is not valid: {error!r}")
    return errors.from_proto(detail)

"""Joins the hosts of one engine: followers call its leader, get its settings, and each ends when the other does.

    follower                                  leader, the engine process of a worker
    Joining(versions)                   ->
                                        <-    Assigned(settings, number of the host), or Unfit(reason)
    Loading(identity of its checkpoint) ->
                                        <-    Fit, or Unfit(reason)
    then both load, and the connection says only by its end that the other is gone

Nothing here is encrypted, and nobody shows who they are. vLLM's own connections between hosts are not encrypted
either, and unpickle what comes: all of them belong on a network that others cannot reach. This module does not import
vLLM.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import psutil

from tandem_engine.errors import ModelUnusable
from tandem_engine.messages import ModelInfo
from tandem_engine.models.checkpoint import Progress
from tandem_engine.settings import EngineConfig

JOIN_SECONDS = 900.0
"""For all followers to call, and for a follower to reach its leader: images are pulled meanwhile."""
_HELLO_SECONDS = 10.0
_CHECK_SECONDS = 3600.0
"""For a follower to find, perhaps to download, and to digest its checkpoint."""
_RETRY_SECONDS = 1.0
_MAX_FRAME_BYTES = 1 << 20
_Message = TypeVar("_Message")


class Network(NamedTuple):
    """What an operator says of an engine's hosts."""

    num_hosts: int
    address: str
    """Of the leader, on the network of the hosts."""
    port: int
    """Where followers call; torch's store listens at the next one."""


class Place(NamedTuple):
    """Where a process stands among the hosts of its engine."""

    num_hosts: int
    rank: int
    """0: the leader."""
    address: str
    """Of the leader; torch's store listens there."""
    port: int


class Joining(msgspec.Struct, frozen=True, tag=True):
    """The first words of a follower."""

    versions: str


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """What a follower loads, and as which host."""

    config: EngineConfig
    place: Place


class Loading(msgspec.Struct, frozen=True, tag=True):
    """What a follower has found under the model's name."""

    identity: list[str]


class Fit(msgspec.Struct, frozen=True, tag=True):
    """The follower has what its leader has."""


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """The follower cannot be part of this engine."""

    reason: str


Message = Joining | Assigned | Loading | Fit | Unfit
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class HostFailed(Exception):
    """Another host has ended, has something else, or takes too long; the message says which. To be tried again."""


def identity_of(model: ModelInfo) -> list[str]:
    """Return what must be equal on all hosts of an engine."""
    adapters = [f"{each.name}={each.digest}" for each in model.adapters]
    return [model.weights_digest, model.tokenizer_digest, model.quantization, model.numerics_class, *adapters]


def use_network(address: str) -> None:
    """Keep gloo's, NCCL's and vLLM's connections on the interface that has this address of ours, where the environment
    names no other. Raises ModelUnusable if no interface has it.
    """
    try:
        ours = {str(found[4][0]) for found in socket.getaddrinfo(address, None)}
    except OSError as error:
        raise ModelUnusable(f"--engine-args: --master-addr {address} is no address: {error}") from error
    found = [(name, each.address) for name, those in psutil.net_if_addrs().items() for each in those]
    matching = [(name, each) for name, each in found if each in ours]
    if not matching:
        raise ModelUnusable(f"--engine-args: no network interface of this host has --master-addr {address}")
    interface, own = matching[0]
    os.environ.setdefault("VLLM_HOST_IP", own)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


# ------------------------------------------------------------------------------------------------- leader


class Followers:
    """The other hosts of this engine."""

    def __init__(self, place: Place, links: Sequence[Link]) -> None:
        self.place = place
        self._links = links

    @classmethod
    def wait(cls, config: EngineConfig, network: Network, versions: str, report: Progress) -> Followers:
        """Listen until all followers have called; raises HostFailed."""
        num_hosts, address, port = network
        deadline = time.monotonic() + JOIN_SECONDS
        links: list[Link] = []
        try:
            listener = socket.create_server((address, port), family=_family(address))
        except OSError as error:
            raise HostFailed(
                f"--engine-args: cannot wait for other hosts at --master-addr {address}, --master-port {port}: {error}"
            ) from error
        with listener:
            while len(links) < num_hosts - 1:
                report(f"waiting for {num_hosts - 1 - len(links)} more hosts of this engine at {address}:{port}", 0.0)
                if (link := _accepted(listener, deadline, versions)) is not None:
                    links.append(link)
        place = Place(num_hosts, 0, address, port + 1)
        for rank, link in enumerate(links, 1):
            link.send(Assigned(config, place._replace(rank=rank)))
        return cls(place, links)

    def check(self, model: ModelInfo) -> None:
        """Compare what each follower has with the leader's; raises HostFailed, and tells the follower why."""
        ours = identity_of(model)
        for link in self._links:
            try:
                theirs = link.receive(Loading, _CHECK_SECONDS).identity
            except HostFailed as error:
                raise HostFailed(f"host {link.name} of this engine cannot load the model: {error}") from error
            if theirs != ours:
                reason = f"it has {', '.join(filter(None, theirs))}, and its leader {', '.join(filter(None, ours))}"
                link.send(Unfit(reason))
                raise HostFailed(f"host {link.name} of this engine has another model or another machine: {reason}")
            link.send(Fit())

    def watch(self, gone: Callable[[str], None]) -> None:
        """Call `gone`, on a thread, when a host is gone."""
        for link in self._links:
            link.watch(partial(gone, f"host {link.name} of this engine is gone"))


def _accepted(listener: socket.socket, deadline: float, versions: str) -> Link | None:
    """Return the next caller, None if it is no follower; raises HostFailed after the deadline."""
    listener.settimeout(max(0.0, deadline - time.monotonic()))
    try:
        link = Link(*listener.accept())
    except (TimeoutError, BlockingIOError):
        raise HostFailed(
            f"not all hosts of this engine have called within {JOIN_SECONDS:.0f} s; start the others with "
            "`python -m tandem_worker.vllm_follower --leader ADDRESS:PORT`"
        ) from None
    try:
        theirs = link.receive(Joining, _HELLO_SECONDS).versions
    except HostFailed:
        link.close()
        return None
    if theirs != versions:
        link.send(Unfit(f"it has {theirs}, and its leader {versions}"))
        link.close()
        return None
    return link


# ------------------------------------------------------------------------------------------------- follower


def join(leader: str, port: int, versions: str, seconds: float = JOIN_SECONDS) -> tuple[Link, Assigned]:
    """Call the leader until it answers, and return what it assigns; raises HostFailed."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            link = Link(socket.create_connection((leader, port), timeout=_HELLO_SECONDS), (leader, port))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostFailed(f"no leader answers at {leader}:{port}: {error}") from error
            time.sleep(_RETRY_SECONDS)
    link.send(Joining(versions))
    return link, link.receive(Assigned, max(_HELLO_SECONDS, deadline - time.monotonic()))


# ------------------------------------------------------------------------------------------------- connections


class Link:
    """A connection between a leader and a follower."""

    def __init__(self, connection: socket.socket, address: tuple[str, int]) -> None:
        self.name = address[0]
        self._socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    @property
    def own_address(self) -> str:
        """The address of this host on the network between the two."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message; one that the other side is too gone to get is dropped, and `receive` tells."""
        content = _encode(message)
        with contextlib.suppress(OSError):
            self._socket.sendall(struct.pack(">I", len(content)) + content)

    def receive(self, kind: type[_Message], seconds: float) -> _Message:
        """Wait for a message of this kind; raises HostFailed."""
        self._socket.settimeout(seconds)
        try:
            (length,) = struct.unpack(">I", self._read(4))
            if length > _MAX_FRAME_BYTES:
                raise HostFailed(f"a message of {length} bytes; Tandem's have at most {_MAX_FRAME_BYTES}")
            message = _decoder.decode(self._read(length))
        except (OSError, msgspec.DecodeError) as error:
            raise HostFailed(f"{type(error).__name__}: {error}") from error
        if isinstance(message, Unfit):
            raise HostFailed(message.reason)
        if not isinstance(message, kind):
            raise HostFailed(f"{type(message).__name__} in the place of {kind.__name__}")
        return message

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone`, on a thread, when the connection ends."""

        def wait() -> None:
            self._socket.settimeout(None)
            with contextlib.suppress(OSError):  # a host that does not answer any more
                self._socket.recv(1)
            gone()

        threading.Thread(target=wait, name=f"host-{self.name}", daemon=True).start()

    def close(self) -> None:
        """End the connection, also for a thread that waits for it here."""
        with contextlib.suppress(OSError):  # the other side has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        content = b""
        while len(content) < num_bytes:
            if not (more := self._socket.recv(num_bytes - len(content))):
                raise HostFailed("the connection was closed")
            content += more
        return content


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

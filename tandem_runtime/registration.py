"""Keeps a worker or KV service registered with every control-plane replica.

One task per replica, in these states:

    away  --Register accepted-->  registered  --beat known-->      registered
    away  --refused, no answer->  away, later registered  --beat unknown-->    away, at once
                                              registered  --no answer-->       away

The replicas are the configured addresses and those named in replies of replicas that answer. Heartbeats are messages of
one stream per replica; a stream that ends is a replica that does not answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem.v1.control_plane_pb2_grpc import ControlPlaneServiceStub
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PeerUnauthenticated,
    TandemError,
    Unavailable,
    Unsupported,
)
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.log import get_logger
from tandem_runtime.server import split_address

log = get_logger(__name__)

CALL_SECONDS = 2.0
GOODBYE_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
_DEFAULT_INTERVAL_SECONDS = 1.0
_FIRST_LOOK = 2
_FAILURES_PER_LOOK = 30
"""After the second failure in a row, and after each 30 more, a replica is looked at: does it refuse our certificate?"""
_JITTER = (0.8, 1.0)
"""A pause between heartbeats is the interval times a random number of this range: never longer than the interval."""


class Registrar:
    """Registers with each replica, sends a heartbeat each second, and registers again where it is unknown.

    Calls `load` on the event loop for every heartbeat: it must be quick. Owned by the process's main coroutine.
    """

    def __init__(
        self,
        control: Sequence[str],
        info: pb.WorkerInfo,
        load: Callable[[], pb.LoadReport],
        *,
        on_registered: Callable[[cp.RegisterReply], None] | None = None,
        member: FleetMember | None = None,
    ) -> None:
        """`control` are gRPC addresses; `dns:///name:port` reaches one replica, whose reply names the others."""
        self._given = tuple(control)
        self._info = pb.WorkerInfo()
        self._info.CopyFrom(info)
        self._load = load
        self._on_registered = on_registered
        self.member = member
        self._replicas: dict[str, _Replica] = {}
        self._registered = asyncio.Event()
        self._kv_keys = KvKeys()
        self._stopped = False
        self.info_version = 0
        self._number = 0
        """Of the last report to any replica."""

    def start(self) -> None:
        self._follow(self._given)

    async def wait_registered(self) -> None:
        """Return once a replica has accepted the registration. The caller sets the deadline."""
        await self._registered.wait()

    @property
    def info(self) -> pb.WorkerInfo:
        return self._info

    @property
    def kv_keys(self) -> KvKeys:
        """The keys of all replicas that have answered: while their secret is changed, handles of both are valid."""
        return self._kv_keys

    @property
    def num_registered(self) -> int:
        """The number of replicas with a current registration."""
        return sum(replica.is_registered for replica in self._replicas.values())

    def kv_service(self) -> cp.KvServiceAddress | None:
        """Return this host's KV service, from the latest reply of a replica; None while there is none."""
        for replica in sorted(self._replicas.values(), key=lambda replica: -replica.answered_at):
            for service in replica.kv_services:
                if service.host_id == self._info.host_id:
                    return service
        return None

    def update_info(self, info: pb.WorkerInfo) -> None:
        """Send changed facts to every replica at once (model card, KV service in use)."""
        assert info.incarnation == self._info.incarnation, "another incarnation is another process"
        self._info.CopyFrom(info)
        self.info_version += 1
        self.beat_now()

    def beat_now(self) -> None:
        """Send a heartbeat to every replica at once, after a change of state such as DRAINING."""
        for replica in self._replicas.values():
            replica.wake()

    async def stop(self) -> None:
        """Deregister from every replica, and end. May be called more than once."""
        self._stopped = True
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.stop() for replica in replicas))

    def register_request(self) -> cp.RegisterRequest:
        return cp.RegisterRequest(
            info=self._info,
            load=self._load(),
            info_version=self.info_version,
            number=self._next_number(),
            deny_list_number=self._deny_list_number,
        )

    def heartbeat_request(self) -> cp.HeartbeatRequest:
        return cp.HeartbeatRequest(
            worker_id=self._info.worker_id,
            incarnation=self._info.incarnation,
            load=self._load(),
            kv_address=self._info.kv_address,
            info_version=self.info_version,
            number=self._next_number(),
            deny_list_number=self._deny_list_number,
        )

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def _deny_list_number(self) -> int:
        return self.member.denied.number if self.member is not None else 0

    def accepted(self, reply: cp.RegisterReply) -> None:
        """Apply a replica's answer to Register. Called by that replica's task."""
        self._merge_keys()
        self._registered.set()
        if self._on_registered is not None:
            self._on_registered(reply)

    def reconcile(self) -> None:
        """Add newly named replicas; drop those that neither settings nor replies name. Called by tasks."""
        named = set(self._given).union(*(replica.named for replica in self._replicas.values()))
        self._follow(named)
        for address in self._replicas.keys() - named:
            self._replicas.pop(address).leave()
            self._merge_keys()

    def doubt_certificate(self) -> None:
        """A replica refuses this process by its certificate: renew it. Called by tasks."""
        if self.member is not None:
            self.member.refused()

    def _merge_keys(self) -> None:
        keys = [replica.keys for replica in self._replicas.values() if replica.keys.public_keys or replica.keys.mac_key]
        keys.sort(key=lambda each: (each.link_key, each.mac_key), reverse=True)  # the same choice in every KV service
        public_keys = tuple(sorted({key for each in keys for key in each.public_keys}))
        if len({(each.link_key, each.public_keys) for each in keys if each.public_keys}) > 1:
            log.warning("handle_keys_differ", remedy="give every control-plane replica the same secret")
        link_key = next((each.link_key for each in keys if each.link_key), b"")
        mac_key = next((each.mac_key for each in keys if each.mac_key), b"")
        self._kv_keys = KvKeys(public_keys, link_key, mac_key)

    def _follow(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            if address not in self._replicas and not self._stopped:
                self._replicas[address] = _Replica(address, self)


class _Replica:
    """The registration with one control-plane replica."""

    def __init__(self, address: str, owner: Registrar) -> None:
        self.is_registered = False
        self.named: tuple[str, ...] = ()
        self.kv_services: tuple[cp.KvServiceAddress, ...] = ()
        self.keys = KvKeys()
        """Of the last accepted registration; kept while the replica is away: its handles are still in use."""
        self.answered_at = 0.0
        self._address = address
        self._owner = owner
        self._sent_version = 0
        self._interval_seconds = _DEFAULT_INTERVAL_SECONDS
        self._num_failures = 0
        self._left = False
        self._woken = asyncio.Event()
        self._channel = open_channel(address, owner.member, "gateway")
        self._stub = ControlPlaneServiceStub(self._channel)
        self._beats: _BeatStream | None = None
        """The open stream of heartbeats."""
        self._next_seconds = 0.0
        """When the next heartbeat is due, by the last reply; 0.0: after the interval."""
        self._takes_stream = True
        """Whether the replica has the stream; those of earlier releases do not."""
        self._task = asyncio.create_task(self._run(), name=f"registration-{address}")

    def wake(self) -> None:
        """Call the replica now instead of at the next interval."""
        self._woken.set()

    def leave(self) -> None:
        """End without a call: the replica is gone."""
        self._left = True
        self.wake()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end_stream()
        if self.is_registered:
            await self._deregister()
        await self._channel.close()

    async def _run(self) -> None:
        while not self._left:
            self._woken.clear()
            try:
                await self._call()
            except TandemError as error:
                self._failed(error.message)
                if isinstance(error, PeerUnauthenticated) or await self._refuses_our_certificate(error):
                    self._owner.doubt_certificate()
            except Exception as error:
                log.exception("registration_failed", control_plane=self._address)
                self._failed(repr(error))
            await self._pause()
        self._end_stream()
        await self._channel.close()

    async def _call(self) -> None:
        if self.is_registered and self._sent_version == self._owner.info_version:
            await self._beat()
        else:
            await self._register()
        self._num_failures = 0
        self._owner.reconcile()

    async def _register(self) -> None:
        version = self._owner.info_version
        reply = await self._stub.Register(self._owner.register_request(), timeout=CALL_SECONDS)
        if not self.is_registered:
            log.info("registered", control_plane=self._address)
        self._sent_version = version
        self._interval_seconds = reply.heartbeat_interval_ms / 1000 or _DEFAULT_INTERVAL_SECONDS
        self._heard(reply)
        self.is_registered = self._takes_stream = True
        self.keys = KvKeys.of(reply)
        self._owner.accepted(reply)

    async def _beat(self) -> None:
        request = self._owner.heartbeat_request()
        if self._takes_stream:
            try:
                reply = await self._streamed(request)
            except Unsupported:
                self._takes_stream = False  # until it registers us again
        if not self._takes_stream:
            reply = await self._stub.Heartbeat(request, timeout=CALL_SECONDS)
        if reply.known:
            self._heard(reply)
        else:
            log.info("reregister_required", control_plane=self._address)
            self.is_registered = False

    async def _streamed(self, request: cp.HeartbeatRequest) -> cp.HeartbeatReply:
        """Send a heartbeat on the stream, which is opened with the first one; return the reply."""
        if self._beats is None:
            self._beats = _BeatStream(self._stub.Heartbeats(), self._asked)
        try:
            return await self._beats.beat(request)
        except BaseException:
            self._end_stream()
            raise

    def _asked(self, reply: cp.HeartbeatReply | None) -> None:
        """The replica has said something unasked: call it now. Or its stream has ended (None): call it within a second.

        A gateway that comes back has a thousand workers.
        """
        if reply is None:
            asyncio.get_running_loop().call_later(random.uniform(0.0, self._interval_seconds), self.wake)
            return
        self._heard(reply)
        self.wake()

    def _end_stream(self) -> None:
        if self._beats is not None:
            self._beats.close()
            self._beats = None

    async def _deregister(self) -> None:
        info = self._owner.info
        try:
            await self._stub.Deregister(
                cp.DeregisterRequest(worker_id=info.worker_id, incarnation=info.incarnation), timeout=GOODBYE_SECONDS
            )
        except TandemError as error:
            log.info("deregister_failed", control_plane=self._address, reason=error.message)

    def _heard(self, reply: cp.RegisterReply | cp.HeartbeatReply) -> None:
        self.named = tuple(reply.replicas)
        self.kv_services = tuple(reply.kv_services)
        self.answered_at = asyncio.get_running_loop().time()
        self._next_seconds = reply.next_ms / 1000 if isinstance(reply, cp.HeartbeatReply) else 0.0
        if self._owner.member is not None:
            self._owner.member.heard(reply)

    def _failed(self, reason: str) -> None:
        self._num_failures += 1
        self._end_stream()
        if self._num_failures == 1:
            log.warning("control_plane_unreachable", control_plane=self._address, reason=reason)
        self.is_registered = False
        self.named = ()
        self.kv_services = ()
        self._owner.reconcile()

    async def _refuses_our_certificate(self, error: TandemError) -> bool:
        """Return whether the replica seems to refuse our handshakes: it listens, and calls fail all the same.

        A server gives no reason. Its clock may be ahead, and our certificate, which it issued before, expired for it.
        """
        is_time = self._num_failures % _FAILURES_PER_LOOK == _FIRST_LOOK
        return is_time and isinstance(error, Unavailable) and await _listens(self._address)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._pause_seconds()):
                await self._woken.wait()
        except TimeoutError:
            return

    def _pause_seconds(self) -> float:
        if self._num_failures == 0:  # jitter: processes that registered together must not beat together for ever
            seconds = self._next_seconds or self._interval_seconds
            return seconds * random.uniform(*_JITTER) if self.is_registered else 0.0
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_failures, 10))
        return longest * random.uniform(0.5, 1.0)


class _BeatStream:
    """One stream of heartbeats. Reads it all the time: a replica may ask for a heartbeat, or go away."""

    def __init__(self, call: Any, on_message: Callable[[cp.HeartbeatReply | None], None]) -> None:
        """`on_message` is called with each reply that nobody waits for, and with None at the end of the stream."""
        self._call = call
        self._on_message = on_message
        self._expected: asyncio.Future[cp.HeartbeatReply] | None = None
        self._failure: BaseException | None = None
        self._reader = asyncio.create_task(self._read(), name="heartbeat-replies")

    async def beat(self, request: cp.HeartbeatRequest) -> cp.HeartbeatReply:
        """Send a heartbeat; return the next reply. Raises what ended the stream, DeadlineExceeded after two seconds."""
        if self._failure is not None:
            raise self._failure
        self._expected = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                try:
                    await self._call.write(request)
                except Unavailable as error:
                    log.debug("heartbeats_ended", error=error.message)  # the reader knows why
                return await self._expected
        except TimeoutError:
            raise DeadlineExceeded(f"no reply to a heartbeat within {CALL_SECONDS} s") from None
        finally:
            self._expected = None

    def close(self) -> None:
        self._on_message = lambda reply: None
        self._reader.cancel()
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                if self._expected is not None and not self._expected.done():
                    self._expected.set_result(reply)
                else:
                    self._on_message(reply)
            raise Unavailable("the control plane ended the stream of heartbeats")
        except Exception as error:  # noqa: BLE001 - kept for who sends the next heartbeat
            self._failure = error
            if self._expected is not None and not self._expected.done():
                self._expected.set_exception(error)
            self._on_message(None)


async def _listens(address: str) -> bool:
    """Return whether something takes TCP connections at a gRPC address."""
    try:
        host, port = split_address(address.removeprefix("dns:///"))
        async with asyncio.timeout(CALL_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, TimeoutError, InvalidRequest):
        return False
    writer.transport.abort()
    return True

"""Measures a data connection over TLS beside one in plain text, and signed handles beside MACs.

python -m benchmarks.kv_transfer.encrypted [--megabytes 256] [--rounds 9]

    plain        a KV service's data connection in plain text: sendmsg, recvmsg_into
    tls          the same over TLS 1.3: OpenSSL reads and writes records on the socket, in threads, into the blocks
    memory_bio   the alternative: large reads of the socket into OpenSSL's memory BIOs, as asyncio's TLS does

The holder is a process of its own; the rounds take turns. Checksums are computed and verified in all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import cast

from benchmarks.kv_transfer.transfers import cpu_seconds
from benchmarks.lib.served import ROOT
from kv_transfer_svc.transport.data_server import DataServer
from kv_transfer_svc.transport.link_tls import LinkTls
from kv_transfer_svc.transport.pieces import groups
from kv_transfer_svc.transport.source import Source
from kv_transfer_svc.transport.tcp_transport import DataConnection
from kv_transfer_svc.transport.wires import TlsWire
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_client.cli.parent_death import die_with_parent
from tandem_runtime.certificates.names import Identity
from tandem_runtime.kv.checksum import block_checksum
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.mac import sign_handle, verify_handle
from tandem_runtime.kv.signatures import HandleSigner, HandleVerifier
from tests.kv_transfer_svc.transport.fleet_certificates import Authority, Member, Peers

BLOCK_BYTES = 256 << 10
_MB = 1 << 20
_BIO_BYTES = 256 << 10


class Blocks:
    """A prompt's blocks in memory, whose checksums are known."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._blocks = [memoryview(os.urandom(BLOCK_BYTES))] * (num_bytes // BLOCK_BYTES)
        self._checksums = [block_checksum(bytes(self._blocks[0]))] * len(self._blocks)

    def __iter__(self) -> Iterator[list[memoryview]]:
        yield from groups(self._blocks)

    def finish(self) -> list[int]:
        return self._checksums


class MemoryBioWire:
    """Reads a TLS connection through memory BIOs: one copy more, and fewer system calls."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str, identity: Identity) -> None:
        self.identity: Identity | None = identity
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._buffer = memoryview(bytearray(_BIO_BYTES))
        self._call(self._shake_hands)

    def send(self, content: bytes, *, more: bool = False) -> None:
        self._tls.write(content)
        self._sock.sendall(self._outgoing.read())

    def exactly(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        self.fill([memoryview(content)])
        return bytes(content)

    def fill(self, group: Sequence[memoryview]) -> None:
        for piece in group:
            rest = piece
            while rest:
                rest = rest[self._call(partial(self._read, rest)) :]

    def close(self) -> None:
        self._sock.close()

    def _shake_hands(self) -> int:
        self._tls.do_handshake()
        return 0

    def _read(self, into: memoryview) -> int:
        return cast(int, self._tls.read(len(into), into))

    def _call(self, attempt: Callable[[], int]) -> int:
        while True:
            try:
                done = attempt()
            except ssl.SSLWantReadError:
                if self._outgoing.pending:
                    self._sock.sendall(self._outgoing.read())
                received = self._sock.recv_into(self._buffer)
                if not received:
                    raise ConnectionResetError("the holder has left") from None
                self._incoming.write(self._buffer[:received])
            else:
                if self._outgoing.pending:
                    self._sock.sendall(self._outgoing.read())
                return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_transfer.encrypted", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        asyncio.run(_hold(options.hold))
        return 0
    _handles()
    seed = os.urandom(32)
    with _holder(seed) as (pid, plain, secured):
        asyncio.run(_links(seed, pid, plain, secured, options.megabytes * _MB, options.rounds))
    return 0


# ---------------------------------------------------------------------------------------------------------- handles


def _handles() -> None:
    """Print what signing and verifying a handle cost, in microseconds."""
    signer, key = HandleSigner(bytes(range(32))), bytes(range(32))
    keys = KvKeys((signer.public_key,))
    handles = [
        pb.KvHandle(
            handle_id=os.urandom(16),
            request_id=f"chatcmpl-{number:032x}",
            prefill_incarnation="0123456789abcdef",
            holder_address="10.20.30.40:50051",
            holder_incarnation="fedcba9876543210",
            model=pb.ModelRef(model_id="meta-llama/Llama-3.2-1B-Instruct", fingerprint=bytes(16)),
            layout_digest=bytes(16),
            num_tokens=4000,
            num_readers=1,
            deadline_unix_ms=1_800_000_000_000,
        )
        for number in range(2000)
    ]
    verifier = HandleVerifier(lambda: keys)
    signed, sign_us = _each(handles, signer.sign)
    _, verify_us = _each(signed, verifier.verify)
    _, again_us = _each(signed, verifier.verify)
    with_mac, mac_us = _each(handles, lambda handle: sign_handle(handle, key))
    _, check_us = _each(with_mac, lambda handle: verify_handle(handle, key))
    print(f"handle: sign {sign_us:.1f} us, verify {verify_us:.1f} us, verified before {again_us:.1f} us")
    print(f"MAC of release 0.2: make {mac_us:.1f} us, verify {check_us:.1f} us")


def _each(handles: Sequence[pb.KvHandle], work: Callable[[pb.KvHandle], pb.KvHandle | None]) -> tuple[list, float]:  # type: ignore[type-arg]
    begun = time.process_time()
    results = [work(handle) for handle in handles]
    return results, (time.process_time() - begun) / len(handles) * 1e6


# ------------------------------------------------------------------------------------------------------------ links


async def _hold(seed: str) -> None:
    """The holder's process: serve one port in plain text and one over TLS, until the parent ends."""
    member = _member(bytes.fromhex(seed))

    @asynccontextmanager
    async def source(request: kv.DataRequest) -> AsyncIterator[Source]:
        if request.probe.num_bytes not in made:
            made[request.probe.num_bytes] = Blocks(request.probe.num_bytes)
        yield made[request.probe.num_bytes]

    made: dict[int, Blocks] = {}
    servers = [DataServer("127.0.0.1:0", lambda request: None, source, tls=tls) for tls in (None, member.tls)]
    print(*[await server.start() for server in servers], flush=True)
    await asyncio.Event().wait()


def _member(seed: bytes) -> Member:
    """Return a holder of the fleet whose authority's key `seed` is; both processes make the same authority."""
    authority = Authority.of(seed)
    return Member(authority, Identity(authority.fleet, "kv", "0" * 16), Peers(authority.fleet))


@contextmanager
def _holder(seed: bytes) -> Iterator[tuple[int, str, str]]:
    """Start the holder's process; yield its id, its address in plain text and the one over TLS."""
    command = die_with_parent([sys.executable, "-m", "benchmarks.kv_transfer.encrypted", "--hold", seed.hex()])
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    try:
        assert process.stdout is not None
        plain, secured = process.stdout.readline().decode().split()
        yield process.pid, plain, secured
    finally:
        process.terminate()
        process.wait()


async def _links(seed: bytes, pid: int, plain: str, secured: str, num_bytes: int, num_rounds: int) -> None:
    holder = _member(seed).identity
    reader = Authority.of(seed).member()
    connections = {
        "plain": await DataConnection.connect(plain),
        "tls": await DataConnection.connect(secured, holder.uri, reader.tls),
        "memory_bio": await asyncio.to_thread(_by_memory_bio, secured, holder, reader.tls),
    }
    assert isinstance(connections["tls"]._wire, TlsWire)
    buffer = memoryview(bytearray(num_bytes))
    into = [buffer[start : start + BLOCK_BYTES] for start in range(0, num_bytes, BLOCK_BYTES)]
    seconds: dict[str, list[float]] = {name: [] for name in connections}
    cpu: dict[str, float] = dict.fromkeys(connections, 0.0)
    for number in range(num_rounds + 1):
        for name, connection in connections.items():
            request = kv.DataRequest(probe=kv.ProbeRequest(num_bytes=num_bytes))
            cpu_before, begun = cpu_seconds([pid]), time.perf_counter()
            await asyncio.to_thread(connection.exchange, request, into)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - begun)
                cpu[name] += cpu_seconds([pid]) - cpu_before
    for name, connection in connections.items():
        connection.close()
        median = sorted(seconds[name])[num_rounds // 2]
        print(
            f"{name:<11} {num_bytes / median / 1e9:.2f} GB/s (best {num_bytes / min(seconds[name]) / 1e9:.2f}), "
            f"{cpu[name] / (num_rounds * num_bytes / 1e9):.2f} CPU s/GB of both processes"
        )


def _by_memory_bio(address: str, holder: Identity, tls: LinkTls) -> DataConnection:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return DataConnection(MemoryBioWire(sock, tls.ssl_context(False), holder.dns_name, holder), address)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())

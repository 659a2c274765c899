"""The baseline of a socket: one process sends, the other receives into memory.

`python -m benchmarks.kv_transfer.bare_socket` is the sending process. The process prints its port, and answers each
length (8 bytes) with that many bytes.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.lib.served import ROOT
from tandem_client.cli.parent_death import die_with_parent

_LENGTH = struct.Struct("<Q")


class BareSocket:
    """The receiving end, in this process."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.pid = process.pid
        self._sock = sock

    def receive(self, into: memoryview) -> None:
        """Ask for as many bytes as `into` has, and receive them there."""
        self._sock.sendall(_LENGTH.pack(len(into)))
        while len(into):
            num_bytes = self._sock.recv_into(into)
            if num_bytes == 0:
                raise RuntimeError("the bare sender has ended")
            into = into[num_bytes:]


@contextmanager
def bare_socket(num_bytes: int) -> Iterator[BareSocket]:
    """Start the sender; it can send up to `num_bytes` at once."""
    command = die_with_parent([sys.executable, "-m", "benchmarks.kv_transfer.bare_socket", str(num_bytes)])
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as sock:
            yield BareSocket(process, sock)
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    content = memoryview(bytearray(b"x") * int(sys.argv[1]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        with sock:
            while asked := sock.recv(_LENGTH.size, socket.MSG_WAITALL):
                sock.sendall(content[: _LENGTH.unpack(asked)[0]])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A call of a new method on a closed channel is refused, and never reaches the memory of gRPC's freed channel."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1.worker_pb2_grpc import WorkerServiceStub, add_WorkerServiceServicer_to_server
from tandem_runtime.channel import open_channel
from tests.certificates import Authority
from tests.tandem_runtime.certificates.worker import SERVICE, Worker
from tests.tandem_runtime.serving import serving

_CHANNELS = 60
_JUNK = "165"
"""glibc fills freed memory with this, so that a use of it shows at once."""


async def _one_call(stub: Any) -> None:
    """Call a method, and keep nothing of the call: it would keep gRPC's channel."""
    stream = stub.Attach()
    await stream.write(pb.Command(hello=pb.AttachHello(gateway_id="g")))
    await stream.done_writing()
    assert (await stream.read()).hello.gateway_id == "g"
    assert await stream.read() is grpc.aio.EOF


async def _call_after_close(folder: Path, is_encrypted: bool) -> None:
    authority = Authority()
    server = authority.member(folder, "decode") if is_encrypted else None
    client = authority.member(folder, "gateway") if is_encrypted else None
    async with serving(partial(add_WorkerServiceServicer_to_server, Worker()), SERVICE, server) as address:
        for _ in range(_CHANNELS):
            channel = open_channel(address, client, server.identity if server is not None else None)
            stub: Any = WorkerServiceStub(channel)
            await _one_call(stub)
            await channel.close()
            await asyncio.sleep(0.01)  # gRPC frees the channel on a thread of its own
            with pytest.raises(grpc.aio.UsageError):
                await stub.Stats(pb.StatsRequest())
            with pytest.raises(grpc.aio.UsageError):
                await WorkerServiceStub(channel).Stats(pb.StatsRequest())


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
def test_a_method_that_was_not_called_before_is_refused(kind: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", __name__, kind, str(tmp_path)],
        env={**os.environ, "MALLOC_PERTURB_": _JUNK},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


if __name__ == "__main__":
    asyncio.run(_call_after_close(Path(sys.argv[2]), sys.argv[1] == "encrypted"))

"""The kernel ends what its gateway can no longer end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys

from control_plane.text.prepared import TextJob
from control_plane.text_processes.wire import AsyncChannel, Hello, Named, Run, Use
from tests.control_plane.text_processes.pools import chat_body, model

TEXT_PROCESS = """
import socket, sys
from control_plane.text.prepared import Preparation
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text_processes import jobs, limits
limits._SPARE_CPU_SECONDS = 0
tokenizer = TextTokenizer(sys.stdin.buffer.read(), {})
jobs.serve(socket.socket(fileno=int(sys.argv[1])), {"key": tokenizer}, Preparation())
"""


async def test_a_job_that_spins_after_its_gateway_died_is_ended_by_the_kernel() -> None:
    ours, its = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TEXT_PROCESS, str(its.fileno()), stdin=subprocess.PIPE, pass_fds=[its.fileno()]
    )
    try:
        its.close()
        assert process.stdin is not None
        process.stdin.write(model().tokenizer_json)
        process.stdin.write_eof()
        gateway = AsyncChannel(ours)
        assert isinstance(await gateway.receive(), Hello)
        await gateway.send(Run(TextJob("chat"), max_cpu_seconds=0.2, max_memory_bytes=1 << 28), chat_body("spin"))
        assert isinstance(await gateway.receive(), Named)
        await gateway.send(Use(model().facts, "key"))
        gateway.close()  # as the kernel does when a gateway dies
        assert await process.wait() == -signal.SIGXCPU
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""A worker over two hosts, two processes on loopback, dies with its follower: streams go on, and both come back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from control_plane.generation import TokenRequest
from tests.ports import free_ports
from tests.system.fleet import Fleet, token_request, tokens_of
from tests.system.reference import clear_prompt, greedy
from tests.system.streams import MODEL

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
NUM_TOKENS = 120
START_SECONDS = 240.0
SMALL = ("--num-threads", "1", "--num-kv-blocks", "128", "--max-model-len", "1024", "--dtype", "float32")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@contextmanager
def follower_of(port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--leader", f"127.0.0.1:{port}", "--vllm-python", PYTHON, "--state-dir", str(folder)]
    command = [sys.executable, "-m", "tandem_worker.vllm_follower", *flags]
    with (
        (folder.parent / "follower.log").open("ab") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


async def test_a_stream_outlives_a_worker_over_two_hosts_which_comes_back(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    [port] = free_ports(1)
    over_hosts = f"--engine-args=--nnodes 2 --master-port {port} --pipeline-parallel-size 2"
    flags = (*SMALL, "--engine", "vllm", "--vllm-python", PYTHON, over_hosts)
    folder = checkpoint("demo")
    prompt = clear_prompt(folder, 40, NUM_TOKENS)
    expected = greedy(folder, prompt, NUM_TOKENS)
    async with Fleet(tmp_path) as fleet:
        fleet.start("kv", "kv-0")
        # 1. the leader waits for its follower, and then the worker answers
        worker = fleet.start("decode", "decode-hosts", *flags)
        with follower_of(port, tmp_path / "follower") as follower:
            await fleet.ready(seconds=START_SECONDS)
            fleet.start("decode", "decode-ours", *SMALL, "--block-size", "16")
            await fleet.ready(seconds=START_SECONDS)
            assert await tokens_of(fleet.dispatcher("decode-hosts"), _plain(prompt, "first")) == [expected]
            # 2. the follower dies in the middle of an answer: the worker ends, and another goes on, flagged
            for number in range(100):
                stream = await fleet.gateway.dispatcher.submit(_plain(prompt, str(number)))
                tokens, is_killed = list[int](), False
                async for delta in stream:
                    tokens += delta.token_ids
                    call = stream.state.choices[0].call
                    if len(tokens) >= 2 and not is_killed and call is not None and call.worker_id == "decode-hosts":
                        is_killed = True
                        follower.kill()
                assert tokens == expected
                if is_killed:
                    break
            (seam,) = stream.state.history.seams
            assert (seam.before.worker_id, seam.after.worker_id) == ("decode-hosts", "decode-ours")
            await fleet.ended(fleet.services.pop("decode-hosts"))
            assert worker.process.returncode != 0
            assert "of this engine is gone" in worker.tail(400)
        # 3. both are started again, as systemd or Kubernetes would, the follower first
        with follower_of(port, tmp_path / "follower") as follower:
            fleet.start("decode", "decode-hosts", *flags)
            await fleet.ready(seconds=START_SECONDS)
            assert await tokens_of(fleet.dispatcher("decode-hosts"), _plain(prompt, "again")) == [expected]
            await fleet.pools_are_full()


def _plain(prompt: list[int], salt: str) -> TokenRequest:
    return token_request(MODEL, prompt, NUM_TOKENS, cacheable=False, salt=salt.encode())

"""Talks to an engine in its own process; the other end is `benchmarks.peers.protocol`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine.kinds import EngineKind
from benchmarks.lib.engine_models import SHAPES, ShapeFacts, made
from benchmarks.lib.served import ROOT
from tandem_client.cli.parent_death import die_with_parent
from tandem_client.cli.supervisor import last_lines

_ORDER_SECONDS = 900.0
_END_SECONDS = 10.0
_MAX_LINE_BYTES = 1 << 20


class EngineFault(RuntimeError):
    """An engine failed; the message holds the end of its output."""


@dataclass(frozen=True)
class Room:
    """What an engine is loaded for: the cores it may use, and the most that it will hold."""

    cpus: tuple[int, ...]
    max_batch: int
    max_context: int


class EngineProcess:
    """One engine of one shape, loaded. `await EngineProcess.started(...)`, then orders, then `end`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def started(cls, kind: EngineKind, shape: str, room: Room, folder: Path) -> EngineProcess:
        """Start the process and load the checkpoint; raises EngineFault."""
        log = folder / f"{kind.name}-{shape}.log"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *die_with_parent([str(kind.python), "-m", kind.module]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**_environment(len(room.cpus)), **kind.environment},
                cwd=ROOT,
                limit=_MAX_LINE_BYTES,
            )
        engine = cls(kind.name, process, log)
        try:
            await engine._load(kind, shape, room)
        except BaseException:
            await engine.end()
            raise
        return engine

    async def prefill(self, num_tokens: int, seed: int) -> float:
        """Return the seconds from a prompt of random tokens to its first token."""
        return float((await self._order("prefill", num_tokens=num_tokens, seed=seed))["seconds"])

    async def hold(self, batch: int, num_tokens: int) -> None:
        """Compute the prompts of a batch, and wait."""
        await self._order("hold", batch=batch, num_tokens=num_tokens)

    async def decode(self, num_steps: int) -> list[float]:
        """Return the seconds of each step."""
        return [float(each) for each in (await self._order("decode", num_steps=num_steps))["seconds"]]

    async def release(self) -> None:
        await self._order("release")

    def cpu_seconds(self) -> float:
        """Return what the process has used so far, its threads together."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def peak_bytes(self) -> int:
        """Return the most memory that it has had resident, loading included."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0

    async def end(self) -> None:
        """End the process: by the end of its input, or, where it does not listen, by SIGKILL."""
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _load(self, kind: EngineKind, shape: str, room: Room) -> None:
        facts = ShapeFacts(SHAPES[shape])
        await self._order(
            "load",
            model=str(await asyncio.to_thread(made, shape, kind.form)),
            vocab_size=facts.shape["vocab_size"],
            num_threads=len(room.cpus),
            cpus=room.cpus,
            max_batch=room.max_batch,
            max_context=room.max_context,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            settings=dict(kind.settings),
        )

    async def _order(self, do: str, **details: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
            await self._process.stdin.drain()
            line = await asyncio.wait_for(self._process.stdout.readline(), _ORDER_SECONDS)
        except (ConnectionError, TimeoutError) as error:
            raise self._fault(do, f"no answer ({type(error).__name__})") from error
        if not line:
            raise self._fault(do, "it has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._fault(do, answer["error"])
        return answer

    def _fault(self, do: str, what: str) -> EngineFault:
        tail = "\n".join(last_lines(self._log, 5))
        return EngineFault(f"{self.name}, command {do}: {what}\n{tail}")


def _environment(num_threads: int) -> dict[str, str]:
    """Return the surroundings, with our number of threads for whoever reads it there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "OMP_", "GOMP_"))}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    return {**kept, **threads, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


async def end_all(engines: Sequence[EngineProcess]) -> None:
    """End all of them."""
    await asyncio.gather(*(engine.end() for engine in engines))

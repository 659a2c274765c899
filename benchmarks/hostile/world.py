"""The world of a measurement: a gateway with accounts, stand-in workers, and a client whose streams are watched."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.processes import OTHER_CORES, Child, Processes
from benchmarks.hostile.encoder_kinds import EMBEDDER
from benchmarks.hostile.exchange import Answer, Script, exchange, post, request
from benchmarks.hostile.maker import CHAT, Maker, words
from benchmarks.hostile.vocabulary import write_model
from benchmarks.lib.served import clean_environment
from benchmarks.lib.stats import percentile
from tandem_engine.demo import MODEL_ID

TOKEN_SECONDS = 0.05
LARGE_MODEL = "large-vocabulary"
CONTEXT_TOKENS = 1 << 21
"""A prompt of 2 MB of random words has about 1.5 million tokens of the built-in model's tokenizer."""
SHORT_MODEL = "short-context"
SHORT_CONTEXT = 2048
_ENDLESS_TOKENS = CONTEXT_TOKENS // 4
_HONEST_BYTES = 100_000
_GIVE_UP_SECONDS = 120.0
_BEGIN_SECONDS = 60.0
_POLL_SECONDS = 0.1
_MODEL_SECONDS = 120.0
_CREATE_ACCOUNTS = """
import sys
from control_plane.account_command import main
sys.exit(max([main(["create", name]) for name in sys.argv[1:]]))
"""


@dataclass(frozen=True)
class Gaps:
    """What the watched streams noticed in a while."""

    seconds: list[float]
    longest: float
    """The open ones included."""
    num_ended: int
    """Streams that were refused or ended, since the start."""

    @property
    def p99(self) -> float:
        return percentile(self.seconds, 99) if self.seconds else self.longest


class Watcher:
    """A process that records something, and answers each line on its stdin with a line of JSON."""

    def __init__(self, module: str, address: tuple[str, int], folder: Path) -> None:
        environment = clean_environment(folder / "state", {})
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, address[0], str(address[1])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.sched_setaffinity(self._process.pid, OTHER_CORES)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def ask(self) -> Any:
        self.tell("")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a watcher ended with exit code {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class World:
    """`with World(folder, ...) as world:` returns once all streams run."""

    def __init__(self, folder: Path, num_streams: int, num_vocabulary_tokens: int, max_body_bytes: int) -> None:
        self._folder = folder
        self._num_streams = num_streams
        self._num_vocabulary_tokens = num_vocabulary_tokens
        self._max_body_bytes = max_body_bytes
        self._processes = Processes(folder)
        self._watchers: list[Watcher] = []

    def __enter__(self) -> World:
        self._processes.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.stop()
        self._processes.__exit__()

    def _start(self) -> None:
        tokens = self._accounts("streams", "hostile", "honest")
        self.gateway = self._processes.gateway()
        self._processes.stand_in(TOKEN_SECONDS, "--context-length", str(CONTEXT_TOKENS))
        self._processes.beside("embedder", "benchmarks.gateway.stand_in_encoder", "--model", EMBEDDER)
        write_model(self._folder / LARGE_MODEL, self._num_vocabulary_tokens)
        self.address = self._processes.address
        self.pings = self._watch("benchmarks.hostile.pinger")
        self._reader = self._watch("benchmarks.hostile.gap_reader")
        body = {"prompt": "hello", "raw": True, "stream": True, "max_tokens": _ENDLESS_TOKENS}
        asked = post(f"/client/v4/accounts/streams/ai/run/{MODEL_ID}", body, tokens["streams"])
        self._reader.tell(json.dumps({"request": asked.hex(), "num_streams": self._num_streams}))
        self._wait_until_streams_run()
        self.maker = Maker(tokens["hostile"], MODEL_ID, LARGE_MODEL, "hostile", self._max_body_bytes)
        chat = {"model": MODEL_ID, "max_tokens": 1}
        honest = words(_HONEST_BYTES, self.maker.chance)
        self._honest = post(CHAT, {**chat, "messages": [{"role": "user", "content": honest}]}, tokens["honest"])
        self._short = post(CHAT, {**chat, "messages": [{"role": "user", "content": "hello"}]}, tokens["honest"])
        self._hostile_token = tokens["hostile"]

    def _accounts(self, *names: str) -> dict[str, str]:
        """Create accounts, with one process, and return their tokens."""
        done = subprocess.run(
            [sys.executable, "-c", _CREATE_ACCOUNTS, *names],
            env=clean_environment(self._processes.state_dir, {}),
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=True,
        )
        tokens = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("token ")]
        return dict(zip(names, tokens, strict=True))

    def _watch(self, module: str) -> Watcher:
        self._watchers.append(Watcher(module, self.address, self._folder))
        return self._watchers[-1]

    def _wait_until_streams_run(self) -> None:
        deadline = time.monotonic() + _BEGIN_SECONDS
        while (seen := self._reader.ask())["num_begun"] < self._num_streams:
            if time.monotonic() > deadline or seen["num_ended"]:
                raise RuntimeError(
                    f"only {seen['num_begun']} of {self._num_streams} streams began; {seen['num_ended']} ended"
                )
            time.sleep(_POLL_SECONDS)

    def start_large_model(self) -> None:
        """Register the model with the large vocabulary, which no gateway has seen before."""
        flags = ["--model", LARGE_MODEL, "--folder", str(self._folder / LARGE_MODEL), "--worker-id", LARGE_MODEL]
        self._beside(LARGE_MODEL, *flags)

    def start_short_model(self) -> None:
        """Register a model with the built-in tokenizer and the built-in model's context."""
        flags = ["--model", SHORT_MODEL, "--worker-id", SHORT_MODEL, "--context-length", str(SHORT_CONTEXT)]
        self._beside(SHORT_MODEL, *flags)

    def _beside(self, name: str, *flags: str) -> Child:
        pace = ["--token-seconds", f"{TOKEN_SECONDS:g}"]
        return self._processes.beside(name, "benchmarks.gateway.stand_in_worker", *pace, *flags)

    def start_crowd(self, num_workers: int) -> Child:
        return self._processes.beside("crowd", "benchmarks.hostile.crowd", "--num-workers", str(num_workers))

    async def wait_served(self, model: str) -> None:
        """Return once the gateway lists a model."""
        question = Script([request("GET", "/v1/models", token=self._hostile_token)])
        deadline = time.monotonic() + _MODEL_SECONDS
        while f'"{model}"'.encode() not in (await self.send(question)).body:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway does not list {model} after {_MODEL_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def gaps(self) -> Gaps:
        """Return what the streams noticed since the last call."""
        self.gateway.check()
        seen = self._reader.ask()
        return Gaps(seen["gaps"], max([seen["open"], *seen["gaps"]]), seen["num_ended"])

    def ping_seconds(self) -> list[float]:
        seconds: list[float] = self.pings.ask()["seconds"]
        return seconds

    async def send(self, script: Script, give_up_seconds: float = _GIVE_UP_SECONDS) -> Answer:
        return await exchange(self.address, script, give_up_seconds)

    async def honest_prompt(self) -> Answer:
        """Send a prompt of 100 KB from an account that does nothing else."""
        return await self.send(Script([self._honest]))

    async def honest_chat(self) -> Answer:
        return await self.send(Script([self._short]))

"""Kills vLLM engines and their workers under streams: `python -m tests.tandem_vllm.storm --minutes 5 --streams 200`.

    aggregated       two decode workers, which compute the prompts too
    disaggregated    two prefill and two decode workers: every prompt is handed over

Both fleets have their turn, each with half of the time and of the streams. Engines and whole workers of each role are
killed in turn. Every answer is asked once before the first kill, in the first fleet, and must be the same ever after. A
fifth of the clients leaves in the middle of an answer. Ends with 1 unless no stream has failed, none is wrong, nothing
is held for anyone, and every kind of kill has happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.runner import logged_to
from tests.system.fleet import Fleet, until

_MODEL = "@tandem/demo"
_START_SECONDS = 300.0
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["root", "leaf"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
_KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1.1, "top_p": 0.95},
    {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}},
)
_LEAVING_SHARE = 0.2
_NUM_QUESTIONS = 24
FLEETS: Mapping[str, Sequence[str]] = {
    "aggregated": ("decode-0", "decode-1"),
    "disaggregated": ("prefill-0", "prefill-1", "decode-0", "decode-1"),
}


@dataclass
class Options:
    """What a run does, in each of its fleets."""

    minutes: float
    num_streams: int
    num_clients: int
    seed: int


@dataclass
class Counts:
    """What has happened."""

    num_streams: int = 0
    num_left: int = 0
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    """By fleet, role, and what was killed."""
    num_open: int = 0
    """Streams that run now."""
    num_open_when_killed: int = 0
    """Streams that ran when something was killed, added up."""


class Storm:
    """The turn of one fleet."""

    def __init__(self, name: str, options: Options, folder: Path, counts: Counts, expected: dict[int, str]) -> None:
        """`counts` and `expected`, the answers by question, are shared with other turns."""
        self._name = name
        self._workers = FLEETS[name]
        self._counts = counts
        self._expected = expected
        self._options = options
        self._fleet = Fleet(
            folder, hash_grain=16, suspect_seconds=3.0, gone_seconds=5.0, request_timeout_seconds=120.0,
            audit_seconds=5.0,
        )  # fmt: skip
        self._num_streams = 0
        self._is_over = False

    async def run(self) -> list[str]:
        """Return what is left or wrong at the end, in sentences."""
        rng = random.Random(self._options.seed)
        async with self._fleet as fleet, httpx.AsyncClient(base_url=fleet.base_url, timeout=180) as http:
            fleet.start("kv", "kv-0", "--arena-bytes", str(64 << 20), "--store-bytes", str(16 << 20))
            for name in self._workers:
                self._start(name)
            await self._ready(self._workers)
            if not self._expected:
                print("asking once, undisturbed", flush=True)
                for number in range(_NUM_QUESTIONS):
                    self._expected[number] = await self._answer(http, number, None)
            print(f"{self._name}: killing", flush=True)
            clients = [
                self._client(http, random.Random(f"{self._options.seed} {i}")) for i in range(self._options.num_clients)
            ]
            await asyncio.gather(self._kill_until_done(rng), *clients)
            await self._ready(self._workers)
            findings = []
            try:
                await fleet.pools_are_full(60)
            except AssertionError as error:
                findings.append(f"something is still held: {error}")
            audit = await fleet.gateway.auditor.verdict()
            return [*findings, *(f"orphan: {finding}" for finding in audit.findings)]

    def _start(self, name: str) -> None:
        role = name.partition("-")[0]
        python = os.environ["TANDEM_VLLM_PYTHON"]
        engine = ("--engine", "vllm", "--vllm-python", python, "--num-threads", "1", "--model", _MODEL)
        sizes = ("--max-model-len", "1000", "--num-kv-blocks", "512", "--max-num-seqs", "16")
        self._fleet.start(role, name, *engine, *sizes, "--lease-seconds", "10")

    async def _ready(self, names: Sequence[str]) -> None:
        def are_up() -> bool:
            found = [self._fleet.worker(name) for name in names]
            return all(worker is not None and worker.is_usable for worker in found)

        await until(are_up, _START_SECONDS, lambda: self._fleet.tails(names))
        await self._fleet.gateway.catalog.prefetch()

    async def _kill_until_done(self, rng: random.Random) -> None:
        """Kill an engine or a whole front, wait until it is up again, and so on; one worker of its role stays up."""
        ends = time.monotonic() + 60 * self._options.minutes
        victims: list[tuple[str, str]] = []
        while time.monotonic() < ends or self._num_streams < self._options.num_streams or self._missing_kills():
            await asyncio.sleep(rng.uniform(2, 6))
            if not victims:
                victims = [(name, what) for name in self._workers for what in ("engine", "front")]
                rng.shuffle(victims)
            await self._kill(*victims.pop())
        self._is_over = True

    def _missing_kills(self) -> set[str]:
        """Return the kinds of kills that have not happened yet; two workers of a role are alike."""
        wanted = {self._kind(name, what) for name in self._workers for what in ("engine", "front")}
        return wanted - set(self._counts.kills)

    def _kind(self, worker: str, what: str) -> str:
        return f"{self._name}: {what} of {worker.partition('-')[0]}"

    async def _kill(self, name: str, what: str) -> None:
        """Kill a worker's engine or front, and start the worker again once both have ended."""
        service = self._fleet.services[name]
        (engine,) = psutil.Process(service.process.pid).children()
        before = self._incarnation(name)
        if what == "engine":
            engine.kill()
        else:
            service.kill(signal.SIGKILL)
        self._counts.kills[self._kind(name, what)] += 1
        self._counts.num_open_when_killed += self._counts.num_open
        print(f"killed the {what} of {name}; {self._counts.num_streams} streams", flush=True)
        await self._fleet.ended(service, 60)
        await until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 20)
        self._start(name)
        await until(lambda: self._incarnation(name) not in ("", before), _START_SECONDS)
        await self._ready([name])

    def _incarnation(self, name: str) -> str:
        worker = self._fleet.worker(name)
        return worker.info.incarnation if worker is not None else ""

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._is_over:
            await asyncio.sleep(rng.random())
            number = rng.choice(list(self._expected))
            leave_after = rng.randrange(20) if rng.random() < _LEAVING_SHARE else None
            self._counts.num_streams += 1
            self._num_streams += 1
            self._counts.num_open += 1
            try:
                text = await self._answer(http, number, leave_after)
            except (AssertionError, httpx.HTTPError) as error:
                self._counts.failures.append(f"{self._name}, question {number}: {type(error).__name__}: {error}")
                continue
            finally:
                self._counts.num_open -= 1
            if leave_after is not None:
                self._counts.num_left += 1
            elif text != self._expected[number]:
                wanted = self._expected[number]
                self._counts.wrong.append(f"{self._name}, question {number}: {text!r} instead of {wanted!r}")

    async def _answer(self, http: httpx.AsyncClient, number: int, leave_after: int | None) -> str:
        prompt = " ".join(f"word {number} {index}" for index in range(1 + 3 * number))
        body = {"model": _MODEL, "messages": [{"role": "user", "content": prompt}], "seed": number, "max_tokens": 60}
        text, num_events = "", 0
        asked = {**body, **_KINDS[number % len(_KINDS)], "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=asked) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if line == "data: [DONE]" or (leave_after is not None and num_events >= leave_after):
                    return text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    num_events += 1
        raise AssertionError("a stream ended without [DONE]")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill vLLM engines and their workers under streams.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=200, help="at least (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS), help="(default: both)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    asked = parser.parse_args()
    num_turns = len(asked.fleets)
    options = Options(asked.minutes / num_turns, -(-asked.streams // num_turns), asked.clients, asked.seed)
    print(f"seed {asked.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="tandem-storm-"))
    counts, findings, expected = Counts(), [], dict[int, str]()
    with logged_to(folder / "control.log"):
        for name in asked.fleets:
            (folder / name).mkdir()
            findings += asyncio.run(Storm(name, options, folder / name, counts, expected).run())
    findings += [*counts.failures, *counts.wrong]
    figures = {
        "streams": counts.num_streams,
        "left": counts.num_left,
        "failed": len(counts.failures),
        "wrong": len(counts.wrong),
        "findings": len(findings),
        "kills": dict(counts.kills),
        "open_when_killed": counts.num_open_when_killed,
        "seed": asked.seed,
    }
    print("\n".join([*findings, json.dumps(figures)]), f"\nlogs: {folder}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

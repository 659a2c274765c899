"""Measures what several gateways find cached of sessions with many turns, beside one gateway.

    python -m benchmarks.sessions [--quick] [--json FILE] [--markdown FILE]

Four workers have a pool each and no store that they share, so a turn finds the blocks of its session on one worker: the
one that had the turn before. A turn's prompt is that of the turn before and some tokens more. Each turn goes to any
gateway, drawn by lot, with the session's id in `x-session-affinity`. In the middle of the load one of the gateways is
killed, and started again at once: it knows nothing then but what block events tell.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway.processes import ALL_CORES, Processes
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.random_model import TINY, made
from benchmarks.lib.report import Rows
from tests.ports import free_ports

MIN_OF_ONE = 0.95
"""Of one gateway's share of cached tokens."""
MAX_OF_MEAN = 1.25
"""The requests of a worker to those of the mean worker."""
_NUM_WORKERS = 4
_BLOCK_TOKENS = 16
_ANSWER_TOKENS = 16
_MODEL = "sessions"
_THINK_SECONDS = (0.5, 2.5)
_READY_SECONDS = 120.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Size:
    num_sessions: int
    num_turns: int
    first_tokens: int = 128
    turn_tokens: int = 48

    @property
    def prompt_tokens(self) -> list[int]:
        """The length of each turn's prompt."""
        return [self.first_tokens + self.turn_tokens * turn for turn in range(self.num_turns)]

    @property
    def pool_blocks(self) -> int:
        """Of each worker: twice its part of all sessions, so that nothing is evicted."""
        tokens = self.num_sessions * (self.prompt_tokens[-1] + _ANSWER_TOKENS)
        return 2 * tokens // _BLOCK_TOKENS // _NUM_WORKERS


FULL, QUICK = Size(64, 16), Size(8, 4)


@dataclass(frozen=True)
class Turn:
    """A turn that was answered."""

    worker: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tries: int
    """Above 1: the gateway that was asked first did not answer."""


@dataclass(frozen=True)
class Found:
    """What became of all turns with a number of gateways."""

    num_gateways: int
    turns: Sequence[Turn]

    @property
    def hit_rate(self) -> float:
        """The cached share of all prompt tokens."""
        return sum(each.num_cached_tokens for each in self.turns) / sum(each.num_prompt_tokens for each in self.turns)

    @property
    def most_of_mean(self) -> float:
        """The requests of the busiest worker, beside the mean of all workers."""
        return max(Counter(each.worker for each in self.turns).values()) * _NUM_WORKERS / len(self.turns)

    @property
    def num_asked_again(self) -> int:
        return sum(each.num_tries > 1 for each in self.turns)


async def converse(num_gateways: int, size: Size, model: Path, folder: Path, seed: int, *, restarts: bool) -> Found:
    """Start a fleet, hold all sessions, and return what was found; `restarts`: the last gateway is killed half-way."""
    with Processes(folder, [ALL_CORES[0]], {ALL_CORES[-1]}) as processes:
        ports = free_ports(num_gateways)
        for port in ports:
            processes.gateway("--listen", f"127.0.0.1:{port}", "--hash-grain", str(_BLOCK_TOKENS))
        processes.service("kv_transfer_svc", "kv", "--store-bytes", "0")
        for number in range(_NUM_WORKERS):
            processes.engine(
                *(f"worker-{number}", "--model", str(model), "--served-model-name", _MODEL, "--dtype", "float32"),
                *("--num-kv-blocks", str(size.pool_blocks), "--block-size", str(_BLOCK_TOKENS), "--num-threads", "1"),
                variables={"OMP_NUM_THREADS": "1"},
            )
        async with httpx.AsyncClient(
            trust_env=False, timeout=60.0, limits=httpx.Limits(max_connections=None)
        ) as client:
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            await _wait_ready(client, urls)
            half = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                turns = group.create_task(_Load(client, urls, size, seed, half).run())
                if restarts:
                    group.create_task(_restart_one(processes, half))
    return Found(num_gateways, turns.result())


async def _restart_one(processes: Processes, half: asyncio.Event) -> None:
    await half.wait()
    await asyncio.to_thread(processes.gateways[-1].kill_and_start_again)


class _Load:
    """All sessions of one run; sets `half` once half of the turns were answered."""

    def __init__(
        self, client: httpx.AsyncClient, urls: Sequence[str], size: Size, seed: int, half: asyncio.Event
    ) -> None:
        self._client, self._urls, self._size, self._seed, self._half = client, urls, size, seed, half
        self._turns: list[Turn] = []

    async def run(self) -> list[Turn]:
        async with asyncio.TaskGroup() as group:
            for number in range(self._size.num_sessions):
                group.create_task(self._session(number))
        return self._turns

    async def _session(self, number: int) -> None:
        drawn = random.Random(f"{self._seed} {number}")
        lengths = self._size.prompt_tokens
        tokens = [drawn.randrange(10, TINY["vocab_size"]) for _ in range(lengths[-1])]
        for length in lengths:
            await asyncio.sleep(drawn.uniform(*_THINK_SECONDS))
            order = drawn.sample(range(len(self._urls)), len(self._urls))
            self._turns.append(await self._turn(number, tokens[:length], order))
            if 2 * len(self._turns) >= self._size.num_sessions * self._size.num_turns:
                self._half.set()

    async def _turn(self, session: int, prompt: list[int], order: Sequence[int]) -> Turn:
        """Ask the gateways in this order, until one has answered."""
        body = {"model": _MODEL, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        headers = {"x-session-affinity": f"session-{session}", "x-tandem-explain": "1"}
        for num_tries, gateway in enumerate(order, 1):
            try:
                answer = await self._client.post(f"{self._urls[gateway]}/v1/completions", json=body, headers=headers)
            except httpx.TransportError:
                continue  # killed, or not up again
            if answer.status_code == 503:
                continue  # just started: it knows no worker yet
            if not answer.is_success:
                raise RuntimeError(f"{answer.status_code}: {answer.text}")
            return _turn_of(answer.json(), num_tries)
        raise RuntimeError(f"no gateway answered session {session}")


def _turn_of(answer: dict[str, Any], num_tries: int) -> Turn:
    usage, route = answer["usage"], answer["tandem"]["explanation"]["route"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(route["decode"], usage["prompt_tokens"], cached, num_tries)


async def _wait_ready(client: httpx.AsyncClient, urls: Sequence[str]) -> None:
    """Wait until each gateway has proven the model and knows all workers."""
    deadline = time.monotonic() + _READY_SECONDS
    for url in urls:
        while not await _is_ready(client, url):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} was not ready within {_READY_SECONDS:g} s")
            await asyncio.sleep(_POLL_SECONDS)


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        if not (await client.get(f"{url}/readyz?model={_MODEL}")).is_success:
            return False
        workers = (await client.get(f"{url}/v1/workers")).json()["data"]
    except httpx.TransportError:
        return False  # nobody listens yet
    num_ready = sum(each["role"] == "decode" and each["state"] == "ready" for each in workers)
    return bool(num_ready == _NUM_WORKERS)


def enter(outcome: Outcome, found: Sequence[Found]) -> None:
    """Enter the figures of each number of gateways; the first is what others are compared with."""
    first, rows = found[0], list[tuple[str, ...]]()
    for each in found:
        ratio = each.hit_rate / first.hit_rate
        name = f"gateways_{each.num_gateways}"
        outcome.figures |= {
            f"{name}.hit_rate": each.hit_rate,
            f"{name}.hit_rate_of_one": ratio,
            f"{name}.busiest_of_mean": each.most_of_mean,
            f"{name}.asked_again": float(each.num_asked_again),
            f"{name}.turns": float(len(each.turns)),
        }
        rows.append(
            (
                f"{each.num_gateways}{', one restarted' if each.num_gateways > 1 else ''}",
                f"{len(each.turns):,}",
                f"{each.hit_rate:.3f}",
                f"{ratio:.3f}",
                f"{each.most_of_mean:.2f}",
                str(each.num_asked_again),
            )
        )
        if each is not first:
            outcome.targets.append(
                Target(
                    f"{each.num_gateways} gateways: token hit rate {ratio:.3f} of one gateway's, {MIN_OF_ONE} wanted",
                    ratio >= MIN_OF_ONE,
                )
            )
        outcome.targets.append(
            Target(
                f"{each.num_gateways} gateways: the busiest worker had {each.most_of_mean:.2f} of the mean, at most "
                f"{MAX_OF_MEAN}",
                each.most_of_mean <= MAX_OF_MEAN,
            )
        )
    head = ("gateways", "turns", "cached", "of one gateway's", "busiest worker / mean", "asked again")
    sheet_rows: Rows = list(rows)
    outcome.sheets.append(Sheet("sessions of many turns", head, sheet_rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    options = parser("sessions", __doc__ or "", "8 sessions of 4 turns").parse_args(arguments)
    size = QUICK if options.quick else FULL

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        model, found = made(folder, "tiny"), []
        for number in (1, 2):
            progress(f"{size.num_sessions} sessions of {size.num_turns} turns, gateways: {number}")
            work = folder / f"gateways-{number}"
            found.append(await converse(number, size, model, work, 2026, restarts=number > 1))
        enter(outcome, found)

    conditions = {"workers": _NUM_WORKERS, "sessions": size.num_sessions, "turns": size.num_turns}
    return run("sessions", options, conditions, measure, is_timed=False)


if __name__ == "__main__":
    sys.exit(main())

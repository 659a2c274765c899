"""Measures two checkouts by turns of seconds, with the processes of both started.

A machine that is shared changes its speed within minutes. Turns of seconds see the same speed on both sides, so their
ratio needs fewer measurements than the ratio of whole runs. The idle side waits for input and takes no turn.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import httpx

from benchmarks.engine.__main__ import PHASES, PLANS
from benchmarks.engine.kinds import OURS, OURS_BF16, OURS_FP32
from benchmarks.engine.limits import measure as measure_limits
from benchmarks.engine.turns import Stage, measure_phases
from benchmarks.gateway.__main__ import ENDLESS_TOKENS, NUM_STREAMS, begin, rate_of
from benchmarks.gateway.processes import OTHER_CORES, Child, Processes, chat_request, native_request
from benchmarks.gateway.sse_readers import Readers
from benchmarks.lib.arrangements import Arrangement, beside_prefill, one_core_each
from benchmarks.lib.command import Progress
from benchmarks.lib.prompts import prompts
from benchmarks.lib.random_model import made
from benchmarks.lib.served import Served
from benchmarks.lib.stats import Answer, percentile
from benchmarks.lib.streaming import ask, new_client

Roots = Mapping[str, Path]
"""The checkouts, by side: `old` and `new`."""
Values = dict[str, dict[str, list[float]]]
"""By figure and side: one value per turn."""


@dataclass(frozen=True)
class Turns:
    """How many turns to take, and of which figures."""

    number: int = 0
    """0: the benchmark's usual number."""
    only: str = ""
    """A pattern that the name of a figure has in it."""

    def wants(self, name: str) -> bool:
        """Return whether figures whose names begin with `name` are measured."""
        return re.search(self.only, name) is not None


_OLD_STAND_IN = "benchmarks/stand_in_worker.py"
_HANDOVER_TURNS = {32: 40, 128: 40, 512: 24, 2048: 12}
"""Requests to each side by the length of the prompt, in tokens."""
_NUM_SHORT_TOKENS = 4
_NUM_WARM_UPS = 50
_GATEWAY_REQUESTS = {"native": native_request, "chat": chat_request}
_TURN_SECONDS = 1.6
_TURNS_PER_START = 4
_AFTER_TURN_SECONDS = 0.5
_TEXT = re.compile(rb'"content":"[^"]')
_ENGINE_CORES = (0, 1)


def imports_from(root: Path) -> dict[str, str]:
    """Return the environment in which Python imports from a checkout, wherever it is started."""
    return {"PYTHONPATH": os.pathsep.join((str(root), str(root / "protos" / "gen"))), "PYTHONSAFEPATH": "1"}


async def engine(roots: Roots, turns: Turns, folder: Path, progress: Progress) -> Values:
    """Return tokens per second of shape M, in float32 and with bfloat16 weights; a turn is 12 steps or one prompt."""
    values = _no_values()
    cpus = tuple(sorted(os.sched_getaffinity(0))[: len(_ENGINE_CORES)])
    stage = Stage(cpus, folder, progress, lambda: measure_limits(cpus, folder, quick=True))
    plan = replace(PLANS["M"], num_rounds=turns.number or 15, num_attempts=1, max_wait_seconds=0.0)
    for name in (OURS_FP32, OURS_BF16):
        kind = next(each for each in OURS if each.name == name)
        kinds = [replace(kind, name=side, environment=imports_from(root)) for side, root in roots.items()]
        phases = [each for each in PHASES if turns.wants(f"M.{name}.{each.name}")]
        if phases:
            async for phase, found in measure_phases(kinds, "M", phases, plan, stage):
                for side in roots:
                    values[f"M.{name}.{phase.name}.tokens_per_second"][side] = found[side].tokens_per_second
    return values


async def gateway(roots: Roots, turns: Turns, folder: Path, progress: Progress) -> Values:
    """Return tokens per CPU second of 256 streams; a turn is 1.6 seconds of new streams.

    Streams of both sides that stay open, with the idle side's worker stopped by a signal, gave rates between 6,000 and
    100,000: the stop changes how many tokens the gateway takes at once. Two starts of one checkout differ by up to 7 %,
    so both sides start anew after every `_TURNS_PER_START` turns.
    """
    values = _no_values()
    number = turns.number or 40
    requests = {name: body for name, body in _GATEWAY_REQUESTS.items() if turns.wants(name)}
    for start in range(0, number, _TURNS_PER_START):
        (at := folder / f"start-{start}").mkdir()
        with _gateways(roots, at) as up:
            progress(f"turns {start + 1} to {min(number, start + _TURNS_PER_START)} of {number}")
            for name, request in requests.items():
                for sides in _orders(roots, min(number - start, _TURNS_PER_START)):
                    for side in sides:
                        processes, server, worker = up[side]
                        with Readers(processes.address, request(ENDLESS_TOKENS), NUM_STREAMS) as readers:
                            begin(readers)
                            rate = rate_of(readers, [server], worker, _TURN_SECONDS)
                        if not rate.num_events:
                            raise RuntimeError(f"{name}: the streams of the {side} side have stopped")
                        values[f"{name}.per_cpu_second"][side].append(rate.per_cpu_second)
                        await asyncio.sleep(_AFTER_TURN_SECONDS)  # for what the streams' end leaves to do
    return values


async def ttft(roots: Roots, turns: Turns, folder: Path, progress: Progress) -> Values:
    """Return the milliseconds from a short chat to the first text, from a stand-in worker; a turn is one request."""
    values = _no_values()
    with _gateways(roots, folder) as up:
        connections = {side: socket.create_connection(processes.address) for side, (processes, *_) in up.items()}
        total = (turns.number or 1000) + _NUM_WARM_UPS
        for turn, sides in enumerate(_orders(roots, total), 1):
            if turn % 100 == 0:
                progress(f"turn {turn} of {total}")
            for side in sides:
                seconds = _seconds_to_text(connections[side])
                if turn > _NUM_WARM_UPS:
                    values["chat.ttft_ms"][side].append(1000 * seconds)
        for connection in connections.values():
            connection.close()
    return values


def _seconds_to_text(connection: socket.socket) -> float:
    """Ask one short chat on a connection and read its whole answer; return the seconds to its first text."""
    answer, seconds = b"", 0.0
    started = time.perf_counter()
    connection.sendall(chat_request(_NUM_SHORT_TOKENS))
    while not answer.endswith(b"\r\n0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            raise RuntimeError(f"the gateway closed the connection:\n{answer.decode(errors='replace')}")
        answer += piece
        if not seconds and _TEXT.search(answer):
            seconds = time.perf_counter() - started
    if not seconds:
        raise RuntimeError(f"an answer without text:\n{answer.decode(errors='replace')}")
    return seconds


@contextmanager
def _gateways(roots: Roots, folder: Path) -> Iterator[dict[str, tuple[Processes, Child, Child]]]:
    """Start a gateway and a stand-in worker of each checkout; yield them, gateway and worker last, by side."""
    os.sched_setaffinity(0, OTHER_CORES)
    with ExitStack() as stack:
        up: dict[str, tuple[Processes, Child, Child]] = {}
        for side, root in roots.items():
            is_old = (root / _OLD_STAND_IN).exists()
            module = "benchmarks.stand_in_worker" if is_old else "benchmarks.gateway.stand_in_worker"
            processes = Processes(folder / side, variables=imports_from(root), stand_in_module=module)
            stack.enter_context(processes)
            up[side] = processes, processes.gateway(), processes.stand_in()
        yield up


async def handover(
    roots: Roots, turns: Turns, folder: Path, progress: Progress, *, num_output_tokens: int = 16
) -> Values:
    """Return times in milliseconds of the random Llama of 0.1 B parameters; a turn is one request.

    The usual number of turns is that of `benchmarks.handover` for each length. With two output tokens a turn of a short
    prompt is several times quicker, and has no decode step.
    """
    values = _no_values()
    model = made(folder, "0.1b")
    arrangement = one_core_each()[0]
    with beside_prefill():
        async with AsyncExitStack() as stack:
            clients = {
                side: await stack.enter_async_context(
                    _served(model, arrangement, root, folder / side, num_output_tokens)
                )
                for side, root in roots.items()
            }
            lengths = {number: usual for number, usual in _HANDOVER_TURNS.items() if turns.wants(f"0_1b.p{number}")}
            for num_tokens, usual_turns in lengths.items():
                source = prompts(model, num_tokens, seed=num_tokens)
                for each in clients.values():
                    for prompt in islice(source, 3):
                        await each(prompt)
                for turn, sides in enumerate(_orders(roots, turns.number or usual_turns), 1):
                    progress(f"{num_tokens} tokens, turn {turn}")
                    prompt = next(source)
                    for side in sides:
                        answer = await clients[side](prompt)
                        gap, *gaps = answer.gaps_seconds
                        times = {"ttft_ms": answer.ttft_seconds, "gap_ms": gap}
                        if gaps:
                            times["decode_step_ms"] = percentile(gaps, 50)
                        for name, seconds in times.items():
                            values[f"0_1b.p{num_tokens}.{name}"][side].append(1000 * seconds)
    return values


@asynccontextmanager
async def _served(
    model: Path, arrangement: Arrangement, root: Path, folder: Path, num_output_tokens: int
) -> AsyncIterator[Callable[[str], Awaitable[Answer]]]:
    """Start `tandem up` of a checkout with a core each for prefill and decode; yield what asks a prompt."""
    environment = {
        **arrangement.environment,
        **imports_from(root),
        "TANDEM_CONTROL_PROBE_INTERVAL_SECONDS": "86400",  # the idle side must not probe itself
        "TANDEM_CONTROL_PROBE_VALID_SECONDS": "172800",
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
        "TANDEM_DECODE_SPECULATION": "off",
    }
    async with Served(folder, ("--model", str(model)), environment, arrangement.roles) as served:
        client: httpx.AsyncClient
        async with new_client(served.base_url) as client:
            yield lambda prompt: ask(client, served.model, prompt, num_output_tokens)


def _orders(roots: Roots, num_turns: int) -> Iterator[Sequence[str]]:
    """Yield the sides of each turn; who comes first changes."""
    sides = list(roots)
    for turn in range(num_turns):
        yield sides if turn % 2 else sides[::-1]


def _no_values() -> Values:
    return defaultdict(lambda: defaultdict(list))


MEASURES: dict[str, tuple[Callable[[Roots, Turns, Path, Progress], Awaitable[Values]], bool]] = {
    "engine": (engine, False),
    "gateway": (gateway, False),
    "handover": (handover, True),
    "handover_gap": (partial(handover, num_output_tokens=2), True),
    "ttft": (ttft, True),
}
"""By benchmark: its measurement, and whether its values are times."""

"""Starts gateways and the workers of two models, and finds what they can do.

Workers have the last core, everything else the first: gateways, and the client, which is this process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import httpx

from benchmarks.gateway.processes import ALL_CORES, Child, Processes
from benchmarks.lib.command import Progress
from benchmarks.lib.random_model import made, words
from benchmarks.overload.arrivals import BLOCK_TOKENS, Arrivals, Sizes, at_once
from benchmarks.overload.asking import Address, Asked, Body, ask
from benchmarks.overload.simulated import seconds_for
from control_plane.simulator.load import device_seconds
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.traces import TraceRequest
from tests.ports import free_ports

MODELS = ("one", "two")
FIRST_CORE, LAST_CORE = ALL_CORES[0], ALL_CORES[-1]
_STAND_IN_SEATS, _STAND_IN_TOKEN_SECONDS = 8, 0.09
STAND_IN_SIZES = Sizes((8, 64), (10, 30))
_ENGINE_SEATS = 4
ENGINE_SIZES = Sizes((16, 256), (120, 280))
_MAX_MODEL_LEN = 1024
_READY_SECONDS = 180.0
_POLL_SECONDS = 0.2
_FIRST_NUMBER = 10_000_000
"""Of the requests that measure speed; the numbers of each wave begin at another hundred, since they make prompts."""
_NUM_SINGLES = 3
_SINGLE_TOKENS = 96
_NUM_WAVES, _WAVE_REQUESTS = 3, 12
"""A wave has so many requests of each model."""


@dataclass(frozen=True)
class System:
    """Gateways and workers that are ready."""

    addresses: list[Address]
    gateways: list[Child]
    sizes: Sizes
    profile: FleetProfile
    capacity: float
    """Requests of these sizes per second, of both models together."""
    body: Body


@dataclass(frozen=True)
class Setup:
    num_gateways: int
    wait_seconds: float
    """The models' budgets."""
    token_seconds: float
    is_stand_in: bool
    checkout: Path | None = None
    """Whose code the gateways run; they have the budgets that they have by themselves then. None: ours."""


@asynccontextmanager
async def started(setup: Setup, folder: Path, progress: Progress) -> AsyncIterator[System]:
    """Start gateways and workers, and measure the workers' speed."""
    with Processes(folder, [FIRST_CORE], {LAST_CORE}) as processes:
        ports = free_ports(setup.num_gateways)
        budgets = f"*={setup.wait_seconds:g}/{setup.token_seconds:g}"
        flags = () if setup.checkout is not None else ("--budgets", budgets)
        for port in ports:
            processes.gateway("--listen", f"127.0.0.1:{port}", *flags, checkout=setup.checkout)
        (_stand_ins if setup.is_stand_in else _engines)(processes, folder)
        await wait_ready(ports)
        addresses = [("127.0.0.1", port) for port in ports]
        if setup.is_stand_in:
            profile, capacity = stand_in_profile()
            yield System(addresses, processes.gateways, STAND_IN_SIZES, profile, capacity, _hello)
        else:
            body = _body_of_words()
            profile, capacity = scaled(await _measured(addresses, body), await _waves(addresses, body))
            progress(f"capacity: {capacity:.2f} requests a second; {profile.decode}")
            yield System(addresses, processes.gateways, ENGINE_SIZES, profile, capacity, body)


def stand_in_profile() -> tuple[FleetProfile, float]:
    """Return what stand-in workers can do, and the requests per second of both models together."""
    seats = _STAND_IN_SEATS + _STAND_IN_SEATS // 8
    worker = WorkerProfile(1000 * _STAND_IN_TOKEN_SECONDS, 0.0, 0.0, 0.001, 0.0, 1 << 20, 1024, max_num_seqs=seats)
    capacity = len(MODELS) * seats / (STAND_IN_SIZES.mean_answer * _STAND_IN_TOKEN_SECONDS)
    return replace(_profile(worker), cores=()), capacity


def _stand_ins(processes: Processes, folder: Path) -> None:
    for model in MODELS:
        processes.beside(
            *(f"worker-{model}", "benchmarks.gateway.stand_in_worker", "--model", model, "--worker-id", model),
            *("--token-seconds", f"{_STAND_IN_TOKEN_SECONDS:g}", "--seats", str(_STAND_IN_SEATS)),
        )


def _engines(processes: Processes, folder: Path) -> None:
    checkpoint = made(folder, "long")
    for model in MODELS:
        processes.engine(
            *(f"worker-{model}", "--model", str(checkpoint), "--served-model-name", model, "--dtype", "float32"),
            *("--max-num-seqs", str(_ENGINE_SEATS), "--max-model-len", str(_MAX_MODEL_LEN), "--speculation", "off"),
            *("--kv-memory-bytes", str(64 << 20), "--num-threads", "1", "--cpus", str(LAST_CORE)),
            variables={"OMP_NUM_THREADS": "1"},
        )


async def wait_ready(ports: Sequence[int], models: Sequence[str] = MODELS) -> None:
    """Return once gateways at these ports serve the models; raises RuntimeError after three minutes."""
    deadline = time.monotonic() + _READY_SECONDS
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        for url in [f"http://127.0.0.1:{port}/readyz?model={model}" for port in ports for model in models]:
            while not await _is_ready(client, url):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{url} was not ready within {_READY_SECONDS:g} s")
                await asyncio.sleep(_POLL_SECONDS)


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).is_success
    except httpx.TransportError:
        return False  # nobody listens yet


def _hello(request: TraceRequest) -> dict[str, object]:
    return body_of("hello" * request.num_prompt_tokens, request)


def _body_of_words() -> Body:
    """Return what makes bodies whose prompts are as long as requests say, and share no beginning."""
    vocabulary = words(1000)

    def body(request: TraceRequest) -> dict[str, object]:
        rng = random.Random(f"{request.number}/{request.arrival}")
        chosen = rng.choices(vocabulary, k=request.num_prompt_tokens)
        return body_of("".join(f" {word}" for word in chosen), request)

    return body


def body_of(prompt: str, request: TraceRequest) -> dict[str, object]:
    """Return the body of a call with that prompt, as it is."""
    return {"prompt": prompt, "raw": True, "stream": True, "max_tokens": request.num_output_tokens, "temperature": 0}


# -------------------------------------------------------------------------------------------------- the workers' speed


def _profile(worker: WorkerProfile, gateway_seconds: float = 0.002) -> FleetProfile:
    """Return a worker of each model, on one core."""
    return FleetProfile(
        0,
        len(MODELS),
        worker,
        worker,
        gateway_seconds=gateway_seconds,
        return_seconds=0.0,
        cores=(0,) * len(MODELS),
        models=MODELS,
    )


async def _measured(addresses: Sequence[Address], body: Body) -> FleetProfile:
    """Return what single requests and a full batch of one model show."""
    numbers = itertools.count(_FIRST_NUMBER)

    async def together(number: int, prompt: int, tokens: int) -> list[Asked]:
        requests = [
            TraceRequest(next(numbers), 0.0, prompt, tokens, (), BLOCK_TOKENS, model=MODELS[0], account="calibration")
            for _ in range(number)
        ]
        return await ask(addresses[:1], Arrivals(requests, [0] * len(requests)), body)

    short, long = ENGINE_SIZES.prompt
    singles: dict[int, list[Asked]] = {short: [], long: []}
    for turn in range(_NUM_SINGLES + 1):
        for prompt, answers in singles.items():
            found = await together(1, prompt, _SINGLE_TOKENS)
            answers += found if turn else []  # the first one warms up
    ttft = {prompt: median(each.ttft_seconds or 0.0 for each in answers) for prompt, answers in singles.items()}
    single_ms = 1000 * median(each.tpot_seconds or 0.0 for each in singles[short])
    batch = await together(_ENGINE_SEATS, short, 2 * _SINGLE_TOKENS)
    batch_ms = 1000 * median(each.tpot_seconds or 0.0 for each in batch)
    answer_ms = max(0.0, (batch_ms - single_ms) / (_ENGINE_SEATS - 1))
    prompt_ms = max(0.001, 1000 * (ttft[long] - ttft[short]) / (long - short))
    worker = WorkerProfile(
        step_ms=max(0.1, single_ms - answer_ms),
        answer_ms=answer_ms,
        context_ms=0.0,
        prompt_ms=prompt_ms,
        prompt_context_ms=0.0,
        kv_tokens=_ENGINE_SEATS * 4 * _MAX_MODEL_LEN,
        bytes_per_token=1024,
        max_num_seqs=_ENGINE_SEATS,
    )
    gateway_seconds = max(0.0, ttft[short] - (short * prompt_ms + worker.step_ms) / 1000)
    return _profile(worker, gateway_seconds)


@dataclass(frozen=True)
class Wave:
    """Requests that were asked for at once."""

    requests: Sequence[TraceRequest]
    """Those that were answered."""
    seconds: float
    """Until the last of them had ended."""


async def _waves(addresses: Sequence[Address], body: Body) -> list[Wave]:
    """Ask for a load's requests of all models, more than have seats, wave after wave."""
    waves = []
    for number in range(1, _NUM_WAVES + 1):
        coming = at_once(_WAVE_REQUESTS, ENGINE_SIZES, MODELS, len(addresses), _FIRST_NUMBER + 100 * number)
        ended = [each for each in await ask(addresses, coming, body) if each.ended_at is not None]
        waves.append(Wave([each.request for each in ended], max(each.ended_at or 0.0 for each in ended)))
    return waves


def scaled(profile: FleetProfile, waves: Sequence[Wave]) -> tuple[FleetProfile, float]:
    """Scale all times of a profile until the simulator needs as long for the waves (median).

    Return that profile, and the capacity: requests of a load's sizes per second on the workers' core.
    """
    factor = median(wave.seconds / seconds_for(profile, wave.requests) for wave in waves)
    worker = profile.decode
    worker = replace(
        worker,
        step_ms=factor * worker.step_ms,
        answer_ms=factor * worker.answer_ms,
        context_ms=factor * worker.context_ms,
        prompt_ms=factor * worker.prompt_ms,
        prompt_context_ms=factor * worker.prompt_context_ms,
    )
    found = replace(profile, prefill=worker, decode=worker, gateway_seconds=factor * profile.gateway_seconds)
    mean = TraceRequest(0, 0.0, round(ENGINE_SIZES.mean_prompt), round(ENGINE_SIZES.mean_answer))
    return found, 1 / device_seconds(mean, 0, found)

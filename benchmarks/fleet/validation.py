"""Compares the simulator with 2 prefill and 2 decode processes on the same arrivals.

The processes serve a random Llama of 0.1 billion parameters. All four engines share one core, as the profile says, and
everything else runs on the others: two cores of a virtual machine may be two threads of one, so engines on both would
slow each other down by an unknown share. Every prompt is handed over. First single requests and a batch give the
profile, then Poisson arrivals of random lengths go to the processes; the simulator gets the same arrivals afterwards.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.lib.arrangements import beside_prefill
from benchmarks.lib.command import Outcome, Progress, Sheet, Target
from benchmarks.lib.prompts import prompts
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.lib.served import Served
from benchmarks.lib.stats import Answer, percentile
from benchmarks.lib.streaming import ask, new_client
from control_plane.simulator.policies.tandem import TandemPolicy
from control_plane.simulator.profiles import FleetProfile, WorkerProfile
from control_plane.simulator.simulation import Simulation
from control_plane.simulator.traces import TraceRequest

_CHUNK_TOKENS = 512
_CHUNK_TOKENS_WITH_ANSWERS = 64
_BLOCK_TOKENS = 16
_LENGTHS = (64, 256, 768)
"""Of the prompts that give the profile; those of the arrivals lie between."""
_OUTPUT_TOKENS = 24
_BATCH = 6
_LOAD = 0.6
"""Of the engines' core."""
_MAX_ERROR = 0.15
_READY = ("decode", "kv", "prefill")


@dataclass(frozen=True)
class Singles:
    """Medians over requests that were alone, by prompt length, and over a batch of answers; milliseconds."""

    ttft_ms: dict[int, float]
    gap_ms: dict[int, float]
    """Between two tokens, after the second."""
    hand_over_gap_ms: float
    """Between token one and token two."""
    batch_gap_ms: float
    """With `_BATCH` answers of the shortest prompt at two workers that share a core."""


async def validate(is_quick: bool, outcome: Outcome, folder: Path, progress: Progress) -> None:
    """Measure, and enter what was found."""
    model = made(folder, "0.1b")
    flags = ("--model", str(model), "--prefill", "2", "--decode", "2")
    environment = _environment()
    with beside_prefill():  # the first core is for everything but the engines
        await _measure(is_quick, outcome, Served(folder / "up", flags, environment, _READY), model, progress)


async def _measure(is_quick: bool, outcome: Outcome, starting: Served, model: Path, progress: Progress) -> None:
    async with starting as served, new_client(served.base_url) as client:
        texts = {length: prompts(model, length, seed=length) for length in range(1, max(_LENGTHS) + 1)}
        singles = await _singles(client, served.model, texts, 1 if is_quick else 15, progress)
        profile = profile_of(singles, *await _pool(client))
        arrivals = arrivals_of(profile, 12 if is_quick else 360, seed=1)
        progress(f"{len(arrivals)} arrivals in {arrivals[-1].arrival:.0f} s")
        answers = await _replay(client, served.model, texts, arrivals)
    simulated = Simulation(profile, [TandemPolicy(profile, 1, hand_over="always")], arrivals).run()
    real_ms = [1000 * answer.ttft_seconds for answer in answers]
    enter(outcome, profile, real_ms, [1000 * answer.ttft_seconds for answer in simulated])


def enter(outcome: Outcome, profile: FleetProfile, real_ms: Sequence[float], simulated_ms: Sequence[float]) -> None:
    """Enter percentiles of both, their ratio and the profile."""
    rows: Rows = []
    for percent in (50, 99):
        real, simulated = percentile(real_ms, percent), percentile(simulated_ms, percent)
        ratio = simulated / real
        outcome.figures |= {
            f"validation.real.ttft_ms.p{percent}": real,
            f"validation.simulated.ttft_ms.p{percent}": simulated,
        }
        rows.append((f"p{percent} TTFT, ms", f"{real:.0f}", f"{simulated:.0f}", f"{ratio:.2f}"))
        text = f"p{percent} TTFT: simulated {simulated:.0f} ms, real {real:.0f} ms; within {_MAX_ERROR:.0%}"
        outcome.targets.append(Target(text, abs(ratio - 1) <= _MAX_ERROR))
    outcome.sheets.append(Sheet("2 + 2 processes", ("", "real", "simulated", "ratio"), rows))
    worker = profile.prefill
    outcome.notes.append(
        f"profile: step {worker.step_ms:.2f} ms, answer {worker.answer_ms:.2f} ms, prompt token {worker.prompt_ms:.3f} "
        f"ms, hand-over {1000 * profile.hand_over_seconds:.1f} ms, gateway {1000 * profile.gateway_seconds:.1f} ms"
    )


def profile_of(singles: Singles, kv_tokens: int, bytes_per_token: int) -> FleetProfile:
    """Return the profile that gives these times."""
    short, long = _LENGTHS[0], _LENGTHS[-1]
    step = max(0.1, singles.gap_ms[short])
    context_ms = max(0.0, (singles.gap_ms[long] - singles.gap_ms[short]) / (long - short))
    # Both workers of a core run half of the batch each, at half speed.
    beside_ms = singles.batch_gap_ms / 2 - step - context_ms * short * (_BATCH / 2 - 1)
    answer_ms = max(0.0, beside_ms / (_BATCH / 2 - 1))
    step_ms = max(0.1, step - answer_ms - context_ms * short)
    constant, linear, square = _parabola(
        [(length, _less_steps(singles.ttft_ms[length], length, step_ms)) for length in _LENGTHS]
    )
    worker = WorkerProfile(
        step_ms=step_ms,
        answer_ms=answer_ms,
        context_ms=context_ms,
        prompt_ms=max(0.001, linear),
        prompt_context_ms=max(0.0, 2 * square),
        kv_tokens=kv_tokens,
        bytes_per_token=bytes_per_token,
        chunk_tokens=_CHUNK_TOKENS,
        chunk_tokens_with_answers=_CHUNK_TOKENS_WITH_ANSWERS,
        max_num_seqs=64,
    )
    return FleetProfile(
        2,
        2,
        worker,
        worker,
        gateway_seconds=max(0.0, constant) / 1000,
        return_seconds=0.0,
        hand_over_seconds=max(0.0, singles.hand_over_gap_ms - step) / 1000,
        cores=(0, 0, 0, 0),
    )


def arrivals_of(profile: FleetProfile, number: int, seed: int) -> list[TraceRequest]:
    """Return Poisson arrivals that take `_LOAD` of the engines' core."""
    rng, worker = random.Random(seed), profile.prefill
    sizes = [(rng.randint(_LENGTHS[0], _LENGTHS[-1]), rng.randint(16, 32)) for _ in range(number)]
    seconds = 0.0
    for prompt, answer in sizes:
        num_steps = -(-prompt // worker.chunk_tokens) + answer - 1
        seconds += worker.prompt_seconds(prompt, 0) + num_steps * (worker.step_ms + worker.answer_ms) / 1000
    now, trace = 0.0, []
    for place, (prompt, answer) in enumerate(sizes):
        now += rng.expovariate(number * _LOAD / seconds)
        trace.append(TraceRequest(place, now, prompt, answer, block_tokens=_BLOCK_TOKENS, max_tokens=32))
    return trace


def _less_steps(ttft_ms: float, length: int, step_ms: float) -> float:
    return ttft_ms - -(-length // _CHUNK_TOKENS) * step_ms


def _parabola(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return a, b, c of a + b x + c x ** 2 through three points."""
    (x0, y0), (x1, y1), (x2, y2) = points
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    c = (second - first) / (x2 - x0)
    b = first - c * (x0 + x1)
    return y0 - b * x0 - c * x0 * x0, b, c


def _environment() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("the engines need a core of their own; this process may use one")
    of_roles = {
        f"TANDEM_{role}_{name}": value
        for role, core in (("PREFILL", cores[-1]), ("DECODE", cores[-1]))
        for name, value in {
            "CPUS": str(core),
            "NUM_THREADS": "1",
            "SPECULATION": "off",
            "DTYPE": "float32",
            "MAX_MODEL_LEN": "1024",
            "KV_MEMORY_BYTES": str(256 << 20),
        }.items()
    }
    return {**of_roles, "OMP_NUM_THREADS": "1", "TANDEM_CONTROL_LOCAL_PREFILL": "never"}


async def _pool(client: httpx.AsyncClient) -> tuple[int, int]:
    """Return the tokens of a decode worker's pool, and the bytes of each."""
    workers = (await client.get("/v1/workers")).json()["data"]
    kv = next(worker["kv"] for worker in workers if worker["role"] == "decode")
    return kv["total_blocks"] * _BLOCK_TOKENS, kv["bytes_per_block"] // _BLOCK_TOKENS


async def _singles(
    client: httpx.AsyncClient, model: str, texts: dict[int, Iterator[str]], num: int, progress: Progress
) -> Singles:
    by_length: dict[int, list[Answer]] = {length: [] for length in _LENGTHS}
    for place in range(num + 1):
        for length in _LENGTHS:
            answer = await ask(client, model, next(texts[length]), _OUTPUT_TOKENS)
            if place:  # the first of each warms up
                by_length[length].append(answer)
    progress("single requests measured")
    batch = [ask(client, model, next(texts[_LENGTHS[0]]), 4 * _OUTPUT_TOKENS) for _ in range(_BATCH)]
    together = await asyncio.gather(*batch)
    began = max(answer.token_times[1] for answer in together)
    ended = min(answer.ended for answer in together)
    gaps = [
        later - earlier
        for answer in together
        for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
        if earlier >= began and later <= ended
    ]
    return Singles(
        {length: median(1000 * each.ttft_seconds for each in answers) for length, answers in by_length.items()},
        {
            length: median(1000 * gap for each in answers for gap in each.gaps_seconds[1:])
            for length, answers in by_length.items()
        },
        median(1000 * each.gaps_seconds[0] for answers in by_length.values() for each in answers),
        1000 * median(gaps),
    )


async def _replay(
    client: httpx.AsyncClient, model: str, texts: dict[int, Iterator[str]], arrivals: Sequence[TraceRequest]
) -> list[Answer]:
    """Send each request at its time. Their texts are made before the first: some hundred take seconds."""
    asked = [(request, next(texts[request.num_prompt_tokens])) for request in arrivals]
    start = asyncio.get_running_loop().time()

    async def send(request: TraceRequest, text: str) -> Answer:
        await asyncio.sleep(max(0.0, start + request.arrival - asyncio.get_running_loop().time()))
        return await ask(client, model, text, request.num_output_tokens)

    return await asyncio.gather(*(send(request, text) for request, text in asked))

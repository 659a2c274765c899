"""Measures the gap between tokens one and two where they come from two workers with vLLM."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.lib.stats import percentile
from benchmarks.vllm_cost.servers import Server, pin, pin_threads
from tests.system.fleet import Fleet, token_request

_NUM_TOKENS = 12
_NUM_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Gaps:
    """Seconds of each answer."""

    first: Sequence[float]
    """Between tokens one and two."""
    steps: Sequence[float]
    """Between the later ones."""
    num_computed_tokens: int
    """Prompt tokens that decode has computed, in all."""

    @property
    def added(self) -> float:
        """What the hand-over adds to a step; medians."""
        return percentile(self.first, 50) - percentile(self.steps, 50)


async def measure_gaps(python: str, model: Path, folder: Path, num_requests: int) -> Gaps:
    """Ask one request after the other; decode's engine has the first core, everything else the other one."""
    flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", python, "--num-threads", "1")
    sizes = ("--dtype", "float32", "--max-model-len", "1000", "--kv-memory-bytes", str(512 << 20))
    chance, cores = random.Random(1), sorted(os.sched_getaffinity(0))
    first: list[float] = []
    steps: list[float] = []
    num_computed_tokens = 0
    async with Fleet(folder, hash_grain=16) as fleet:
        fleet.start("kv", "kv-a")
        for role in ("prefill", "decode"):
            fleet.start(role, f"{role}-a", *flags, *sizes)
        await fleet.ready()
        worker = fleet.worker("decode-a")
        assert worker is not None, "ready"
        for name, core in (("prefill-a", cores[-1]), ("decode-a", cores[0])):
            pin(Server("", name, fleet.services[name].process.pid), core, cores[-1])
        for pid in (os.getpid(), fleet.services["kv-a"].process.pid):  # the gateway runs in this process
            pin_threads(psutil.Process(pid), cores[-1])
        model_id = worker.info.card.model_id
        await fleet.handed_over(model_id, "prefill-a", "decode-a")
        for _ in range(num_requests):
            prompt = [chance.randrange(3, 3000) for _ in range(_NUM_PROMPT_TOKENS)]
            request = token_request(model_id, prompt, _NUM_TOKENS, cacheable=False)
            times: list[float] = []
            stream = await fleet.dispatcher("decode-a", "prefill-a").submit(request)
            async for delta in stream:
                times += [time.perf_counter()] * len(delta.token_ids)
            gaps = [later - earlier for earlier, later in pairwise(times)]
            first.append(gaps[0])
            steps += gaps[1:]
            [choice] = stream.state.choices
            assert choice.ledger is not None, "a whole answer has a ledger"
            num_computed_tokens += choice.ledger.num_computed_tokens
    return Gaps(first, steps, num_computed_tokens)

"""Measures the adapter's own CPU time in the engine's process, request by request over its socket."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vllm_parity.sides import serving
from tandem_engine.client import Program
from tandem_engine.messages import AddRequest
from tandem_engine.sampling_params import SamplingParams
from tandem_worker.vllm_program import vllm_program

SAMPLINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(1, temperature=0.0),
    "top-p": SamplingParams(1, seed=1, temperature=0.8, top_p=0.95),
    "penalties": SamplingParams(1, seed=1, temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1),
}
_NUM_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Busy:
    """CPU seconds of the engine's thread while it has requests; see `metered.py`."""

    steps: int
    cpu: float
    vllm: float
    draw: float
    add: float

    @property
    def own(self) -> float:
        """Seconds in what is Tandem's."""
        return self.cpu - self.vllm - self.add + self.draw

    @property
    def share(self) -> float:
        return self.own / self.cpu


async def measure_adapter(
    python: str, model: Path, folder: Path, batches: tuple[int, ...], num_tokens: int
) -> Mapping[tuple[str, int], Busy]:
    """Return the times of one round for each sampling and number of requests at once."""
    figures = folder / "busy.jsonl"
    program = vllm_program(python, folder)
    script = str(Path(__file__).with_name("metered.py"))
    metered = Program((python, "-P", script, str(figures)), program.python_path)
    rounds = [("greedy", 1), *((sampling, batch) for batch in batches for sampling in SAMPLINGS)]  # the first warms up
    chance = random.Random(1)
    async with serving(metered, model) as engine:
        for number, (sampling, batch) in enumerate(rounds):
            await engine.answers([_request(f"{number}-{i}", sampling, num_tokens, chance) for i in range(batch)])
    found = [Busy(**json.loads(line)) for line in figures.read_text().splitlines()]
    assert len(found) == len(rounds), f"{len(found)} busy times for {len(rounds)} rounds"
    return dict(zip(rounds[1:], found[1:], strict=True))


def _request(name: str, sampling: str, num_tokens: int, chance: random.Random) -> AddRequest:
    prompt = [chance.randrange(3, 3000) for _ in range(_NUM_PROMPT_TOKENS)]
    base = SAMPLINGS[sampling]
    taken = {each: getattr(base, each) for each in base.__struct_fields__}
    return AddRequest(name, prompt, len(prompt), SamplingParams(**{**taken, "max_tokens": num_tokens}))

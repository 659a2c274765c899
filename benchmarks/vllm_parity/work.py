"""Makes the requests: prompts of random tokens, and a kind of sampling for each."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_engine.grammar import Grammar
from tandem_engine.messages import AddRequest
from tandem_engine.sampling_params import SamplingParams

NUM_TOKENS = 48
_EOS = (0, 2)
"""The ends of an answer of the built-in model; the others have the second one."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["root", "leaf", "none"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
KINDS = ("greedy", "seeded", "penalties", "schema")


@dataclass(frozen=True)
class Asked:
    """One request, which may be asked again with a part of its answer behind the prompt."""

    name: str
    kind: str
    prompt: Sequence[int]
    sampling: SamplingParams
    cut: int
    """Tokens of the answer behind which it moves."""

    def request(self, answer: Sequence[int] = ()) -> AddRequest:
        """Return the message; `answer` is what a worker before has generated."""
        name = f"{self.name}-moved" if answer else self.name
        return AddRequest(name, [*self.prompt, *answer], len(self.prompt), self.sampling)


def prompts(num_prompts: int, seed: int) -> list[list[int]]:
    """Return prompts of 3 to 200 tokens that share no prefix."""
    chance = random.Random(seed)
    return [[chance.randrange(3, 3072) for _ in range(chance.randrange(3, 200))] for _ in range(num_prompts)]


def requests(numbers: Mapping[str, int], seed: int) -> list[Asked]:
    """Return as many requests of each kind; the greedy ones have the prompts of `prompts(number, seed)`."""
    chance = random.Random(seed + 1)
    asked: list[Asked] = []
    for place, (kind, number) in enumerate(numbers.items()):
        for index, prompt in enumerate(prompts(number, seed + 100 * place)):
            sampling = _sampling(kind, chance.getrandbits(63))
            asked.append(Asked(f"{kind}-{index}", kind, prompt, sampling, chance.randrange(1, 21)))
    return asked


def _sampling(kind: str, seed: int) -> SamplingParams:
    match kind:
        case "greedy":
            return SamplingParams(NUM_TOKENS, temperature=0.0)
        case "seeded":
            return SamplingParams(NUM_TOKENS, seed=seed, temperature=1.1, top_p=0.95, top_k=200)
        case "penalties":
            return SamplingParams(
                NUM_TOKENS,
                seed=seed,
                temperature=0.9,
                min_p=0.001,
                repetition_penalty=1.2,
                frequency_penalty=0.6,
                presence_penalty=0.3,
                logit_bias={7: 2.0, 40: -3.0},
                stop_token_ids=_EOS,
                min_tokens=30,
            )
    grammar = Grammar("json_schema", json.dumps(_SCHEMA))
    return SamplingParams(NUM_TOKENS, seed=seed, temperature=1.0, grammar=grammar, stop_token_ids=_EOS)

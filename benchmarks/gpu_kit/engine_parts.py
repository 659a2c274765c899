"""The parts that run engines in their own process: limits, parity, determinism, and speed beside transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_kit import limits
from benchmarks.gpu_kit.compare import equal_share, parity, ratio_of_medians, steady_gaps
from benchmarks.gpu_kit.ours import Answer, Ours, Size
from benchmarks.gpu_kit.part import Figures, Runs, Settings
from benchmarks.gpu_kit.theirs import Theirs
from benchmarks.lib import random_model
from benchmarks.peers.protocol import prompt_ids
from tandem_engine.demo import checkpoint_path
from tandem_engine.sampling_params import MAX_LOGPROBS

HAS_CHILDREN = False
_PARITY_PROMPT_TOKENS = 48
_QUESTIONS = (
    "What is 17 + 25?",
    "Which is the capital of France?",
    "Name three colours.",
    "Write a sentence about the sea.",
)
_TOP_P = 0.95
_TEMPERATURE = 0.8


class Rig:
    """The engines that several parts use, loaded when the first of them needs one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.form = settings.form
        self._ours: Ours | None = None
        self._theirs: Theirs | None = None

    @property
    def model(self) -> Path:
        """The random Llama, made where it is not there yet."""
        return random_model.made(self.settings.folder, self.form.shape)

    @property
    def size(self) -> Size:
        return self._size_for(max(*self.form.batches, self.form.sampling_batch))

    def _size_for(self, max_batch: int) -> Size:
        form = self.form
        num_kv_tokens = max(max_batch * (form.prompt_tokens + form.answer_tokens), form.prefill_tokens + 1)
        return Size(max_batch, num_kv_tokens, form.max_batched_tokens)

    @property
    def ours(self) -> Ours:
        if self._ours is None:
            self._ours = Ours(self.model, self.settings.device, self.size)
        return self._ours

    @property
    def theirs(self) -> Theirs:
        """In the dtype of `ours`."""
        if self._theirs is None:
            size = self._size_for(max(self.form.batches))
            self._theirs = Theirs(self.model, self.settings.device, size, dtype=self.ours.info.dtype)
        return self._theirs

    def close(self) -> None:
        """Give the memory of both engines back."""
        if self._ours is not None:
            self._ours.close()
        if self._theirs is not None:
            self._theirs.close()
        self._ours = self._theirs = None

    def prompts(self, count: int, num_tokens: int, seed: int) -> list[list[int]]:
        """Return prompts of random tokens that share no beginning with those of another seed."""
        vocab_size = random_model.SHAPES[self.form.shape]["vocab_size"]
        return [prompt_ids(num_tokens, vocab_size, seed * 1000 + number) for number in range(count)]


@asynccontextmanager
async def open_rig(settings: Settings) -> AsyncIterator[Rig]:
    rig = Rig(settings)
    try:
        yield rig
    finally:
        rig.close()


async def _card(rig: Rig) -> Figures:
    return limits.card(rig.settings.device)


async def _limits(rig: Rig) -> Figures:
    return limits.limits(rig.settings.device, rig.form)


async def _parity_demo(rig: Rig) -> Figures:
    """Compare in float32, the dtype of the CPU, and in the one that the device takes by itself."""
    from tokenizers import Tokenizer

    model = checkpoint_path()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(question).ids for question in _QUESTIONS]
    return _parity(rig, model, prompts, ("float32", "auto"))


async def _parity_random(rig: Rig) -> Figures:
    return _parity(rig, rig.model, rig.prompts(rig.form.parity_prompts, _PARITY_PROMPT_TOKENS, 1), ("auto",))


def _parity(rig: Rig, model: Path, prompts: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Figures:
    longest = max(map(len, prompts)) + rig.form.parity_tokens
    size = Size(len(prompts), len(prompts) * longest, rig.form.max_batched_tokens)
    reference, reference_class = _answers(model, "cpu", size, "auto", prompts, rig.form.parity_tokens)
    chosen = [[each.chosen.logprob for each in answer.logprobs] for answer in reference]
    tops = [[{one.token_id: one.logprob for one in each.top} for each in answer.logprobs] for answer in reference]
    figures: Figures = {"reference": reference_class}
    for dtype in dtypes:
        answers, own_class = _answers(model, rig.settings.device, size, dtype, prompts, rig.form.parity_tokens)
        found = parity(_tokens(answers), _tokens(reference), chosen, tops)
        figures[dtype] = {"numerics_class": own_class, **found}
    return figures


def _answers(
    model: Path, device: str, size: Size, dtype: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[Answer], str]:
    """Return greedy answers of an engine of its own, and its numerics class."""
    engine = Ours(model, device, size, dtype=dtype)
    try:
        return engine.run(prompts, num_tokens, num_logprobs=MAX_LOGPROBS), engine.info.numerics_class
    finally:
        engine.close()


async def _determinism(rig: Rig) -> Figures:
    """Answer the same requests again: in the same batch, each alone, and in batches of every size."""
    engine, form = rig.ours, rig.form
    largest = max(form.batches)
    prompts = rig.prompts(largest, form.prompt_tokens, 2)

    def answers(batch: int) -> list[Answer]:
        found: list[Answer] = []
        for first in range(0, largest, batch):
            found += engine.run(prompts[first : first + batch], form.parity_tokens, num_logprobs=1)
        return found

    reference = answers(largest)
    figures: Figures = {"numerics_class": engine.info.numerics_class, "num_answers": largest}
    for batch in sorted({largest, largest // 2, 1}, reverse=True):
        again = answers(batch)
        figures[f"batch_{batch}_against_batch_{largest}"] = {
            "equal_tokens_share": equal_share(_tokens(again), _tokens(reference)),
            "equal_bits_share": equal_share(_bits(again), _bits(reference)),
        }
    return figures


async def _decode(rig: Rig) -> Figures:
    """Measure the gaps between the tokens of whole batches, by turns."""
    form, figures = rig.form, _conditions(rig)
    for batch in form.batches:
        gaps: dict[str, list[float]] = {"ours": [], "transformers": []}
        for turn in range(form.num_turns + 1):
            prompts = rig.prompts(batch, form.prompt_tokens, 10 + turn)
            ours = steady_gaps(_times(rig.ours.run(prompts, form.answer_tokens)))
            theirs = steady_gaps(_times(rig.theirs.run(prompts, form.answer_tokens)))
            if turn:  # the first one warms up
                gaps["ours"] += ours
                gaps["transformers"] += theirs
        figures[f"batch_{batch}"] = {
            **{f"{side}_step_ms": 1000 * median(each) for side, each in gaps.items()},
            **{f"{side}_tokens_per_second": batch / median(each) for side, each in gaps.items()},
            "ratio": ratio_of_medians(gaps["transformers"], gaps["ours"]),
        }
    return figures


async def _prefill(rig: Rig) -> Figures:
    """Measure the time from one prompt to its token, with nothing else to do and nothing cached, by turns."""
    form, figures = rig.form, _conditions(rig)
    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for turn in range(2 * form.num_turns + 1):
        prompts = rig.prompts(1, form.prefill_tokens, 100 + turn)
        for side, engine in (("ours", rig.ours), ("transformers", rig.theirs)):
            answer = engine.run(prompts, 1)[0]
            if turn:
                seconds[side].append(answer.times[0] - answer.added)
    return {
        **figures,
        "num_tokens": form.prefill_tokens,
        **{f"{side}_ms": 1000 * median(each) for side, each in seconds.items()},
        "ratio": ratio_of_medians(seconds["transformers"], seconds["ours"]),
    }


async def _sampling(rig: Rig) -> Figures:
    """Compare steps whose rows are drawn with a temperature and top-p with steps of greedy rows, by turns."""
    form, engine = rig.form, rig.ours
    gaps: dict[str, list[float]] = {"greedy": [], "top_p": []}
    for turn in range(form.num_turns + 1):
        prompts = rig.prompts(form.sampling_batch, form.prompt_tokens, 200 + turn)
        greedy = steady_gaps(_times(engine.run(prompts, form.sampling_tokens)))
        drawn = engine.run(prompts, form.sampling_tokens, temperature=_TEMPERATURE, top_p=_TOP_P)
        if turn:
            gaps["greedy"] += greedy
            gaps["top_p"] += steady_gaps(_times(drawn))
    return {
        "batch": form.sampling_batch,
        "vocab_size": engine.info.vocab_size,
        **{f"{kind}_step_ms": 1000 * median(each) for kind, each in gaps.items()},
        "ratio": ratio_of_medians(gaps["top_p"], gaps["greedy"]),
    }


async def _overlap(rig: Rig) -> Figures:
    """Compare an engine that plans ahead with one that does not, by turns: tokens and gaps."""
    form = rig.form
    rig.close()
    batch = max(form.batches)
    engines: dict[str, Ours] = {}
    try:
        for choice in ("on", "off"):
            engines[choice] = Ours(rig.model, rig.settings.device, rig.size, overlap=choice)
        gaps: dict[str, list[float]] = {choice: [] for choice in engines}
        equal: list[float] = []
        for turn in range(form.num_turns + 1):
            prompts = rig.prompts(batch, form.prompt_tokens, 300 + turn)
            answers = {choice: engine.run(prompts, form.answer_tokens) for choice, engine in engines.items()}
            equal.append(equal_share(_tokens(answers["on"]), _tokens(answers["off"])))
            for choice, each in answers.items():
                gaps[choice] += steady_gaps(_times(each)) if turn else []
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "batch": batch,
        **{f"{choice}_step_ms": 1000 * median(each) for choice, each in gaps.items()},
        "ratio": ratio_of_medians(gaps["off"], gaps["on"]),
        "equal_tokens_share": min(equal),
    }


def _conditions(rig: Rig) -> Figures:
    form, info = rig.form, rig.ours.info
    return {
        "model": {
            "shape": form.shape,
            "num_parameters": info.num_parameters,
            "weight_bytes": limits.weight_bytes(rig.model),
        },
        "prompt_tokens": form.prompt_tokens,
        "answer_tokens": form.answer_tokens,
        "ours": {"numerics_class": info.numerics_class, "dtype": info.dtype, "kv_bytes": rig.ours.kv_bytes},
        "transformers": rig.theirs.conditions,
        "process_memory": limits.process_memory(rig.settings.device),
    }


def _tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def _times(answers: Sequence[Answer]) -> list[list[float]]:
    return [answer.times for answer in answers]


def _bits(answers: Sequence[Answer]) -> list[list[tuple[int, Any]]]:
    """Return tokens with their log probabilities: equal ones came from equal logits."""
    return [[(each.chosen.token_id, each.chosen.logprob) for each in answer.logprobs] for answer in answers]


RUNS: Runs = {
    "card": _card,
    "limits": _limits,
    "parity_demo": _parity_demo,
    "parity_random": _parity_random,
    "determinism": _determinism,
    "decode": _decode,
    "prefill": _prefill,
    "sampling": _sampling,
    "overlap": _overlap,
}

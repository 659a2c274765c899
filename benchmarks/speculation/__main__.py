"""Measures the speed-up of speculative decoding, and its cost where drafts cannot help.

python -m benchmarks.speculation [--quick] [--json FILE] [--markdown FILE]

One request at a time, through the engine's own step loop, with speculation off and on by turns: the same prompts, the
same seeds. What is timed are the steps behind the first token. Every answer must be the same, token for token. Turns
are answers, and where these take seconds, with random weights, steps: what a machine does changes within seconds.

    copying, json       the built-in model's held-out questions, greedily
    stories             of the built-in model at temperature 1
    ... alone           without earlier answers to guess from: each request is of an account of its own
    random              a Llama with random weights at temperature 1: what it says never repeats itself
    ... with a copy     of the model as its draft model: always right, greedily, and as slow
    ... with a stranger as a draft model of a sixth of the layers: always wrong
    deep                the built-in model with eight times its layers, which add nothing, and itself as draft model
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ab.ratios import Ratio, ratio_of_sums
from benchmarks.lib import engine_models
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.speculation import draft_models
from demo_model.corpus import held_out
from demo_model.corpus.mixture import FAMILIES
from demo_model.corpus.sample import Message, Tool
from demo_model.corpus.split import Split
from tandem_engine.demo import checkpoint_path

if TYPE_CHECKING:
    from tandem_engine.core import EngineCore

LEAST_FOR_COPYING = 2.5
LEAST_FOR_JSON = 1.4
LEAST_ELSEWHERE = 0.97
"""The interval must not lie wholly below it."""
_MAX_TOKENS = 192
_NUM_THREADS = 1
_DEMO = "@tandem/demo"


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    max_tokens: int = _MAX_TOKENS
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """Prompts to one model. `least` is the target for the ratio of tokens per second; None: reported only."""

    name: str
    prompts: Sequence[Prompt]
    temperature: float
    least: float | None
    is_one_account: bool = True
    draft_model: str = ""
    """Used by the side that speculates."""
    turns_are_steps: bool = False


@dataclass
class Side:
    """One engine, and what it did for the task at hand."""

    core: EngineCore
    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    answer_seconds: list[float] = field(default_factory=list)
    """Of each answer, in the order of the prompts."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def answer(self, request_id: str, prompt: Prompt, sampling: dict[str, Any], root: str) -> Iterator[list[int]]:
        """Yield the answer so far after each step; its first token, and the step it came in, are not counted."""
        from tandem_engine.messages import AddRequest, Refused
        from tandem_engine.sampling_params import SamplingParams

        params = SamplingParams(prompt.max_tokens, stop_token_ids=prompt.stop_token_ids, **sampling)
        ask = AddRequest(request_id, prompt.token_ids, len(prompt.token_ids), params, hash_root=root)
        if refused := [event for event in self.core.handle(ask) if isinstance(event, Refused)]:
            raise RuntimeError(refused[0].message)
        token_ids: list[int] = []
        seconds_before = self.seconds
        while self.core.has_work():
            started = time.perf_counter()
            outputs = self.core.step().outputs
            if token_ids:
                self.seconds += time.perf_counter() - started
                self.num_steps += 1
                self.num_tokens += sum(len(output.token_ids) for output in outputs)
            token_ids += [token_id for output in outputs for token_id in output.token_ids]
            yield token_ids
        self.answer_seconds.append(self.seconds - seconds_before)
        self.num_drafted += outputs[-1].num_draft_tokens
        self.num_accepted += outputs[-1].num_accepted_tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = parser("speculation", __doc__, "few questions, a tiny random model: does it still work?").parse_args(
        arguments
    )
    conditions = {
        "client": "none: the engine's step loop is driven in this process",
        "requests": f"one at a time, {_NUM_THREADS} thread, each with speculation off and auto by turns; "
        "with random weights, step by step",
        "engine": "defaults but for speculation; new ones for each task, warmed by a request that left nothing",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        rows = []
        for model, tasks in _tasks(options.quick, progress):
            for task in tasks:
                progress(f"{task.name}: {len(task.prompts)} requests")
                off, auto = measured(task, partial(_engine, model, task.draft_model))
                rows.append(_row(task, off, auto))
                _enter(task, off, auto, outcome)
        head = (
            "task",
            "answer tokens",
            "off tok/s",
            "auto tok/s",
            "ratio",
            "95 % interval",
            "guesses right",
            "tokens per step",
        )
        outcome.sheets.append(Sheet("tokens per second at batch 1", head, rows))

    return run("speculation", options, conditions, measure)


def measured(task: Task, engine: Callable[[str], EngineCore]) -> tuple[Side, Side]:
    """Return what both sides did; raises RuntimeError if an answer is not the same on both."""
    off, auto = (_warm(engine(speculation), task) for speculation in ("off", "auto"))
    for number, prompt in enumerate(task.prompts):
        sampling = {"temperature": task.temperature, "seed": number}
        root = f"{1 if task.is_one_account else number + 1:032x}"
        first, second = (off, auto) if number % 2 else (auto, off)
        request_id = f"{task.name}-{number}"
        answers = [side.answer(request_id, prompt, sampling, root) for side in (first, second)]
        answer, again = _taking_turns(answers) if task.turns_are_steps else [_last(each) for each in answers]
        if answer != again:
            raise RuntimeError(f"{request_id}: with guesses the answer is another one: {answer} and {again}")
    return off, auto


def _warm(core: EngineCore, task: Task) -> Side:
    """Return a side whose engine has answered once, leaving nothing to be found."""
    _last(Side(core).answer("warm-up", task.prompts[0], {"temperature": task.temperature}, root=""))
    return Side(core)


def ratio_of(off: Side, auto: Side) -> Ratio:
    """Return the ratio of tokens per second, with the 95 % interval over the answers: equal tokens on both sides."""
    return ratio_of_sums(off.answer_seconds, auto.answer_seconds)


def _last(answer: Iterator[list[int]]) -> list[int]:
    *_, token_ids = answer
    return token_ids


def _taking_turns(answers: Sequence[Iterator[list[int]]]) -> list[list[int]]:
    """Return what the answers end with, a step of one and a step of the next in turn."""
    token_ids: list[list[int]] = [[] for _ in answers]
    for steps in zip_longest(*answers):
        token_ids = [before if after is None else after for before, after in zip(token_ids, steps, strict=True)]
    return token_ids


def _tasks(is_quick: bool, progress: Progress) -> Iterator[tuple[str, list[Task]]]:
    """Yield models, each with its tasks."""
    num_items, num_stories, num_random, num_deep = (4, 2, 1, 1) if is_quick else (150, 40, 6, 12)
    questions = _held_out("questions", num_items)
    yield (
        _DEMO,
        [
            Task("copying", _held_out("copying", num_items), 0.0, LEAST_FOR_COPYING),
            Task("json", _held_out("json", num_items), 0.0, LEAST_FOR_JSON),
            Task("stories", _stories(num_stories), 1.0, LEAST_ELSEWHERE),
            Task("stories alone", _stories(num_stories), 1.0, LEAST_ELSEWHERE, is_one_account=False),
            Task("questions alone", questions, 1.0, LEAST_ELSEWHERE, is_one_account=False),
            Task("questions with a copy", questions, 0.0, None, is_one_account=False, draft_model=_DEMO),
        ],
    )
    shape = "tiny" if is_quick else "S"
    progress(f"making shape {shape}, where it is not there yet")
    model = str(engine_models.made(shape, "bf16"))
    prompts = _random_prompts(shape, num_random)
    with_stranger = Task(
        "random with a stranger",
        prompts,
        1.0,
        None,
        draft_model=str(draft_models.stranger(shape)),
        turns_are_steps=True,
    )
    yield model, [Task("random", prompts, 1.0, LEAST_ELSEWHERE, turns_are_steps=True), with_stranger]
    deep = Task("deep", _stories(num_deep), 1.0, LEAST_ELSEWHERE, is_one_account=False, draft_model=_DEMO)
    yield str(draft_models.deep_demo()), [deep]


def _held_out(family: str, number: int) -> list[Prompt]:
    items = [item for item in held_out(number) if item.family == family]
    return [_chat(item.messages, item.tools) for item in items]


def _stories(number: int) -> list[Prompt]:
    samples = [FAMILIES["stories"](random.Random(f"speculation {index}"), Split.HELD_OUT) for index in range(number)]
    return [_chat(sample.messages[:-1], sample.tools) for sample in samples]


def _chat(messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
    tokenizer = _tokenizer()
    text = tokenizer.apply_chat_template(
        [message.as_dict() for message in messages],
        tools=list(tools) or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(list(token_ids), stop_token_ids=(tokenizer.eos_token_id,))


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizers: Any = AutoTokenizer
    return tokenizers.from_pretrained(checkpoint_path(), local_files_only=True)


def _random_prompts(shape: str, number: int) -> list[Prompt]:
    rng, vocab_size = random.Random(shape), engine_models.SHAPES[shape]["vocab_size"]
    return [Prompt([rng.randrange(2, vocab_size) for _ in range(128)], max_tokens=64) for _ in range(number)]


def _engine(model: str, draft_model: str, speculation: str) -> EngineCore:
    from tandem_engine.assembly import assemble
    from tandem_engine.settings import EngineConfig

    config = EngineConfig(
        model=model,
        device="cpu",
        num_threads=_NUM_THREADS,
        num_kv_blocks=512,
        speculation="auto" if speculation == "auto" else "off",
        draft_model=draft_model if speculation == "auto" else "",
    )
    return assemble(config, lambda stage, fraction: None).core


def _row(task: Task, off: Side, auto: Side) -> tuple[str, ...]:
    return (
        task.name,
        f"{off.num_tokens:,}",
        f"{off.tokens_per_second:,.0f}",
        f"{auto.tokens_per_second:,.0f}",
        f"{ratio_of(off, auto).value:.3f}",
        "{0.low:.2f} to {0.high:.2f}".format(ratio_of(off, auto)),
        f"{auto.num_accepted:,} of {auto.num_drafted:,}",
        f"{auto.num_tokens / auto.num_steps:.2f}",
    )


def _enter(task: Task, off: Side, auto: Side, outcome: Outcome) -> None:
    ratio = ratio_of(off, auto)
    name = task.name.replace(" ", "_")
    outcome.figures |= {
        f"{name}.off_tokens_per_second": off.tokens_per_second,
        f"{name}.auto_tokens_per_second": auto.tokens_per_second,
        f"{name}.ratio": ratio.value,
        f"{name}.low": ratio.low,
        f"{name}.high": ratio.high,
        f"{name}.draft_tokens": auto.num_drafted,
        f"{name}.accepted_tokens": auto.num_accepted,
        f"{name}.tokens_per_step": auto.num_tokens / auto.num_steps,
    }
    if task.least is not None:
        is_met = (ratio.high if task.least == LEAST_ELSEWHERE else ratio.value) >= task.least
        shown = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        outcome.targets.append(Target(f"{task.name}: {shown} times the tokens per second, target {task.least}", is_met))


if __name__ == "__main__":
    sys.exit(main())

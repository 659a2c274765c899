"""Compares tokens of Tandem with vLLM inside with those of vLLM alone, and with those of answers that moved.

    TANDEM_VLLM_PYTHON=build/vllm/bin/python python -m benchmarks.vllm_parity [--quick] [--models llama ...]

For each model: `vllm.LLM` answers greedy prompts, and shows how far one log probability differs between two batches.
Then an engine process of Tandem answers the same prompts, and seeded, penalised and structured ones; each is asked
again with the first tokens of its answer behind the prompt, as after a migration, and of a fleet of a prefill and a
decode worker (not with `--aggregated`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.vllm_parity.handed_over import HandedOver, answers_by_two
from benchmarks.vllm_parity.sides import MODELS, WORKER_FLAGS, Alone, ask_alone, made, serving
from benchmarks.vllm_parity.work import KINDS, Asked, prompts, requests
from tandem_worker.vllm_program import vllm_program

_NUMBERS = {"greedy": 100, "seeded": 50, "penalties": 50, "schema": 50}
_QUICK = {"greedy": 12, "seeded": 6, "penalties": 6, "schema": 6}
_NOISE_FACTOR = 8
"""The margin below which two logits count as equal, in units of the difference that another batch makes."""
_MIN_MARGIN = 1e-5
"""What rounding may do to logits of about ten in float32, where no difference was seen."""
_MIN_EQUAL_SHARE = 0.95
_HEAD_ALONE = ("model", "answers", "equal to the end", "noise", "margin", "smallest lead", "close calls", "wrong")
_HEAD_MOVED = ("model", *KINDS, "different")
_HEAD_ALL = ("answers", "compared", "different")
_HEAD_HANDED = ("model", *KINDS, "different", "prompts computed again", "bytes pulled")


@dataclass(frozen=True)
class Compared:
    """Answers of Tandem beside those of vLLM alone."""

    num_equal: int
    num_close_calls: int
    """Answers whose first difference is where vLLM's two best log probabilities lie within the margin."""
    num_wrong: int
    smallest_lead: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, save; return 1 if answers differ."""
    parsing = parser("vllm_parity", __doc__ or "", "12 % of the requests")
    parsing.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: all)")
    parsing.add_argument("--aggregated", action="store_true", help="leave out the fleet of two workers")
    options = parsing.parse_args(arguments)
    python = os.environ.get("TANDEM_VLLM_PYTHON", "")
    if not python:
        raise SystemExit("TANDEM_VLLM_PYTHON must name the interpreter of an environment with vLLM")
    numbers = _QUICK if options.quick else _NUMBERS

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        outcome.sheets += [
            Sheet("beside vLLM alone, greedy", _HEAD_ALONE, []),
            Sheet("moved answers", _HEAD_MOVED, []),
            Sheet("prefill and decode by two workers, beside one", _HEAD_HANDED, []),
            Sheet("all models", _HEAD_ALL, []),
        ]
        for model in options.models:
            checkpoint = made(folder, model)
            whole = await _compare(outcome, python, model, checkpoint, folder, numbers, progress)
            if not options.aggregated:
                progress(f"{model}: two workers")
                asked = requests(numbers, _seed(model))
                place = folder / f"fleet-{model}"
                place.mkdir()
                _enter_handed(
                    outcome, model, asked, whole, await answers_by_two(python, checkpoint, place, asked, WORKER_FLAGS)
                )
        _enter_all(outcome, options.models)

    return run("vllm_parity", options, {"requests per model": sum(numbers.values())}, measure, is_timed=False)


async def _compare(
    outcome: Outcome, python: str, name: str, model: Path, folder: Path, numbers: Mapping[str, int], progress: Progress
) -> Mapping[str, Sequence[int]]:
    """Compare one engine process with vLLM alone and with itself; return its answers by name."""
    seed = _seed(name)
    asked = requests(numbers, seed)
    progress(f"{name}: vLLM alone")
    alone = await ask_alone(python, model, folder, prompts(numbers["greedy"], seed), numbers["greedy"] // 3)
    progress(f"{name}: Tandem")
    async with serving(vllm_program(python, folder), model) as engine:
        whole = await engine.answers([each.request() for each in asked])
        long_enough = [each for each in asked if len(whole[each.name]) > each.cut]
        rest = await engine.answers([each.request(whole[each.name][: each.cut]) for each in long_enough])
        num_used_blocks = engine.num_used_blocks
    margin = max(_MIN_MARGIN, _NOISE_FACTOR * alone.noise)
    compared = compare(alone, [whole[each.name] for each in asked if each.kind == "greedy"], margin)
    differing = [each for each in long_enough if whole[each.name][each.cut :] != rest[f"{each.name}-moved"]]
    for each in differing:
        outcome.notes.append(f"{name}: {each.name}, moved behind {each.cut} tokens, goes on differently")
    beside, moved = (sheet.rows for sheet in outcome.sheets[:2])
    _enter(outcome, name, alone, compared, margin, beside)
    kinds = [sum(each.kind == kind for each in long_enough) for kind in KINDS]
    moved.append((name, *(str(number) for number in kinds), str(len(differing))))
    outcome.figures |= {f"{name}.num_moved": len(long_enough), f"{name}.num_moved_different": len(differing)}
    outcome.targets += [
        Target(f"{name}: {len(differing)} of {len(long_enough)} moved answers differ, 0 wanted", not differing),
        Target(f"{name}: {num_used_blocks} blocks are used after all, 0 wanted", not num_used_blocks),
    ]
    return whole


def _enter_handed(
    outcome: Outcome,
    name: str,
    asked: Sequence[Asked],
    whole: Mapping[str, Sequence[int]],
    handed: Mapping[str, HandedOver],
) -> None:
    differing = [each.name for each in asked if list(handed[each.name].tokens) != list(whole[each.name])]
    num_computed = sum(each.num_computed_tokens > 0 for each in handed.values())
    num_bytes = sum(each.num_bytes_pulled for each in handed.values())
    outcome.notes += [f"{name}: {each}, handed over, has another answer" for each in differing]
    kinds = [sum(each.kind == kind for each in asked) for kind in KINDS]
    cells = (str(len(differing)), str(num_computed), f"{num_bytes:,}")
    outcome.sheets[2].rows.append((name, *(str(number) for number in kinds), *cells))
    outcome.figures |= {
        f"{name}.num_handed_over": len(asked),
        f"{name}.num_handed_over_different": len(differing),
        f"{name}.num_handed_over_computed": num_computed,
        f"{name}.num_bytes_pulled": num_bytes,
    }
    text = f"{name}: {len(differing)} of {len(asked)} answers of two workers differ from those of one, 0 wanted"
    outcome.targets.append(Target(text, not differing))


def _enter_all(outcome: Outcome, models: Sequence[str]) -> None:
    """Add up what must not differ, over all models."""

    def total(name: str) -> int:
        return sum(int(outcome.figures.get(f"{model}.{name}", 0)) for model in models)

    counts = {
        "greedy answers, by vLLM alone": (total("num_answers"), total("num_wrong")),
        "answers of one engine, moved": (total("num_moved"), total("num_moved_different")),
        "answers of one engine, by prefill and decode": (
            total("num_handed_over"),
            total("num_handed_over_different"),
        ),
    }
    outcome.sheets[3].rows.extend((f"{number:,}", what, str(different)) for what, (number, different) in counts.items())
    num_requests, num_different = map(sum, zip(*counts.values(), strict=True))
    outcome.figures |= {"num_compared": num_requests, "num_different": num_different}
    text = f"{num_different} of {num_requests:,} compared answers differ, 0 wanted"
    outcome.targets.append(Target(text, not num_different))


def _seed(name: str) -> int:
    return 1000 * MODELS.index(name)


def compare(alone: Alone, answers: Sequence[Sequence[int]], margin: float) -> Compared:
    """Compare up to the first position whose two best log probabilities are closer than `margin`."""
    num_equal = num_close_calls = 0
    for expected, margins, tokens in zip(alone.tokens, alone.margins, answers, strict=True):
        pairs = enumerate(zip(expected, tokens, strict=True))
        first = next((place for place, (one, other) in pairs if one != other), None)
        num_equal += first is None
        num_close_calls += first is not None and min(margins[: first + 1]) < margin
    smallest = min(min(each) for each in alone.margins)
    return Compared(num_equal, num_close_calls, len(answers) - num_equal - num_close_calls, smallest)


def _enter(outcome: Outcome, name: str, alone: Alone, compared: Compared, margin: float, rows: Rows) -> None:
    num_answers = len(alone.tokens)
    share = compared.num_equal / num_answers
    numbers = (f"{alone.noise:.1e}", f"{margin:.1e}", f"{compared.smallest_lead:.1e}")
    counts = (str(compared.num_close_calls), str(compared.num_wrong))
    rows.append((name, str(num_answers), f"{compared.num_equal} ({share:.1%})", *numbers, *counts))
    outcome.figures |= {
        f"{name}.num_answers": num_answers,
        f"{name}.num_equal": compared.num_equal,
        f"{name}.num_close_calls": compared.num_close_calls,
        f"{name}.num_wrong": compared.num_wrong,
        f"{name}.noise": alone.noise,
        f"{name}.num_positions_of_noise": alone.num_compared,
        f"{name}.margin": margin,
        f"{name}.smallest_lead": compared.smallest_lead,
    }
    outcome.targets += [
        Target(
            f"{name}: {compared.num_wrong} answers differ where the lead is above {margin:.1e}, 0 wanted",
            not compared.num_wrong,
        ),
        Target(
            f"{name}: {share:.1%} of answers are equal to the end, {_MIN_EQUAL_SHARE:.0%} wanted",
            share >= _MIN_EQUAL_SHARE,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Grades a packaged model on the held-out questions: `python -m demo_model.grade --per-family 50`.

An answer counts only if it equals the expected answer word for word.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.corpus import GradedItem, held_out
from tandem_engine.demo import checkpoint_path

_MAX_NEW_TOKENS = 192


@dataclass(frozen=True)
class Graded:
    """One graded question with the model's answer."""

    item: GradedItem
    answer: str

    @property
    def is_right(self) -> bool:
        """Return whether the answer equals the expected answer."""
        return self.answer.strip() == self.item.expected.strip()


class Answerer:
    """Answers chats greedily with a packaged model, through transformers."""

    def __init__(self, folder: Path) -> None:
        # transformers' Auto classes are untyped.
        self._tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(folder, padding_side="left")
        self._model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, messages: Sequence[dict[str, str]], tools: Sequence[Any] = ()) -> str:
        """Return the text of a chat up to the beginning of the answer."""
        rendered: str = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        return rendered

    @torch.inference_mode()
    def complete(self, prompts: Sequence[str], max_new_tokens: int = _MAX_NEW_TOKENS) -> list[str]:
        """Return the greedy continuation of each prompt, without control tokens."""
        inputs = self._tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
        output = self._model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=max_new_tokens
        )
        new_tokens = output[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = self._tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        return answers


def grade(
    answerer: Answerer, items: Sequence[GradedItem], batch_size: int = 25, max_new_tokens: int = _MAX_NEW_TOKENS
) -> list[Graded]:
    """Answer every item, prompts of like length together."""
    prompts = [(answerer.prompt([m.as_dict() for m in item.messages], item.tools), item) for item in items]
    prompts.sort(key=lambda pair: len(pair[0]))
    graded: list[Graded] = []
    for start in range(0, len(prompts), batch_size):
        chunk = prompts[start : start + batch_size]
        answers = answerer.complete([prompt for prompt, _ in chunk], max_new_tokens)
        graded += [Graded(item, answer) for (_, item), answer in zip(chunk, answers, strict=True)]
    return graded


def shares(graded: Sequence[Graded]) -> dict[str, float]:
    """Return the share of right answers in each family."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    for one in graded:
        right[one.item.family].append(one.is_right)
    return {family: sum(marks) / len(marks) for family, marks in sorted(right.items())}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m demo_model.grade", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=checkpoint_path(), help="the package's folder")
    parser.add_argument("--per-family", type=int, default=300, help="questions in each family")
    parser.add_argument("--families", nargs="*", help="only these")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads to use")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers of each family")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    items = [item for item in held_out(arguments.per_family) if item.family in (arguments.families or [item.family])]
    graded = grade(Answerer(arguments.checkpoint), items)
    for family, share in shares(graded).items():
        print(json.dumps({"family": family, "right": round(share, 4), "items": arguments.per_family}))
        wrong = [one for one in graded if one.item.family == family and not one.is_right]
        for one in wrong[: arguments.show_wrong]:
            print(f"  asked    {one.item.question!r}\n  expected {one.item.expected!r}\n  answered {one.answer!r}")


if __name__ == "__main__":
    main()

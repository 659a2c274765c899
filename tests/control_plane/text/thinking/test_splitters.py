"""Thinking and answer are separated as the templates define it, however an answer is cut into pieces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import pytest

from control_plane.text.thinking.forms import FORMS, THINK, Begins, ThinkingForm, begins, form_of, is_harmony
from control_plane.text.thinking.harmony import HarmonySplitter
from control_plane.text.thinking.planning import Splitter
from control_plane.text.thinking.splitter import ThinkingSplitter
from control_plane.text.tools.forms import HARMONY
from control_plane.text.tools.harmony import MARKS
from tests.control_plane.api.model import CHATML
from tests.control_plane.text.thinking.templates import DEEPSEEK_R1, GPT_OSS, QWEN3

NUM_CASES = 500
WORDS = (
    "a",
    "I see",
    "\n",
    "\n\n",
    " ",
    "<",
    "</",
    "</think",
    "<think",
    "think>",
    "{",
    '"',
    "é",
    "😀",
    "<|",
    "|>",
    "1.",
)


def split(splitter: Splitter, pieces: Sequence[str]) -> tuple[str, str]:
    found = [splitter.push(piece) for piece in pieces]
    found.append(splitter.flush())
    return "".join(each.thinking for each in found), "".join(each.answer for each in found)


def cut(text: str, chance: random.Random) -> list[str]:
    pieces = []
    while text:
        length = chance.choice((1, 1, 2, 5, 20, 100))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def words(chance: random.Random, most: int = 12) -> str:
    return "".join(chance.choices(WORDS, k=chance.randint(0, most)))


# --------------------------------------------------------------------------- Qwen3, DeepSeek-R1 and others like them


def reference(form: ThinkingForm, where: Begins, text: str) -> tuple[str, str]:
    """As Qwen3's template reads an answer again: behind the opening, up to the closing, without the lines around."""
    if where == "answer":
        return "", text
    if where == "undecided":
        if not text.lstrip().startswith(form.opening):
            return "", text
        text = text.lstrip()[len(form.opening) :]
    if form.closing not in text:
        return text.lstrip("\n"), ""
    thinking, answer = text.split(form.closing, 1)
    return thinking.strip("\n"), answer.lstrip("\n")


@pytest.mark.parametrize("where", ["thinking", "undecided", "answer"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_answers_are_split_as_the_templates_do(form: ThinkingForm, where: Begins) -> None:
    chance = random.Random(f"{form.name} {where}")
    num_thought = 0
    for _ in range(NUM_CASES):
        parts = [words(chance, 2), chance.choice(("", form.opening)), words(chance), chance.choice(("", form.closing))]
        text = "".join(parts) + words(chance) + chance.choice(("", "", form.closing, form.opening))
        expected = reference(form, where, text)
        num_thought += bool(expected[0] and expected[1])
        for pieces in ([text], list(text), cut(text, chance)):
            splitter = ThinkingSplitter(form, where)
            found = split(splitter, pieces)
            assert (found[0].rstrip("\n"), found[1]) == (expected[0].rstrip("\n"), expected[1]), (text, pieces)
    assert num_thought > 20 or where == "answer"


def test_where_an_answer_begins_is_seen_at_the_prompts_end() -> None:
    assert begins(THINK, "assistant\n<think>\n") == "thinking"
    assert begins(THINK, "assistant\n<think>\n\n</think>\n\n") == "answer"
    assert begins(THINK, "assistant\n") == "undecided"


def test_forms_are_recognised_by_their_templates() -> None:
    assert form_of(QWEN3) is form_of(DEEPSEEK_R1) is THINK and form_of(CHATML) is None
    known = dict.fromkeys(MARKS, 5)
    assert is_harmony(GPT_OSS, known) and not is_harmony(GPT_OSS, {}) and not is_harmony(QWEN3, known)


def test_thinking_is_over_once_the_answer_has_begun() -> None:
    splitter = ThinkingSplitter(THINK, "undecided")
    seen = []
    for piece in ("\n", "<think", ">", "\nso", "\n</think>", "\n", "\nyes"):
        splitter.push(piece)
        seen.append((splitter.is_thinking, splitter.is_over))
    assert seen == [*[(True, False)] * 4, *[(False, False)] * 2, (False, True)]
    assert splitter.has_thought


# -------------------------------------------------------------------------------------------------------- gpt-oss


def harmony(messages: Sequence[tuple[str, str]], end: str) -> str:
    """Return an answer as the template renders it, behind `<|start|>assistant`."""
    written = [
        f"{'' if channel.startswith(' to=') else '<|channel|>'}{channel}<|message|>{text}" for channel, text in messages
    ]
    return "<|end|><|start|>assistant".join(written) + end


def harmony_reference(text: str, *, takes_calls: bool) -> tuple[str, str]:
    """Read an answer message by message."""
    thinking, answer = list[str](), ""
    for message in re.split(r"<\|end\|><\|start\|>assistant", re.sub(r"<\|(return|call)\|>$", "", text)):
        header, _, content = message.partition("<|message|>")
        name = re.search(r"to=functions\.(\w+)", header)
        if name and takes_calls:
            answer += f'{HARMONY.openings[0]}{{"name": "{name[1]}", "arguments": {content}}}'
        elif "analysis" in header and content:
            thinking.append(content)
        elif not name and "analysis" not in header:
            answer += content
    return "\n".join(thinking), answer


@pytest.mark.parametrize("takes_calls", [True, False])
def test_messages_go_by_their_channels(takes_calls: bool) -> None:
    chance = random.Random(takes_calls)
    for _ in range(NUM_CASES):
        messages = [
            (chance.choice(("analysis", "analysis", "commentary")), words(chance)) for _ in range(chance.randint(0, 3))
        ]
        arguments = json.dumps({"city": words(chance)})
        last = chance.choice(
            (
                ("final", words(chance)),
                ("commentary to=functions.look <|constrain|>json", arguments),
                (" to=functions.look<|channel|>commentary json", arguments),
            )
        )
        text = harmony([*messages, last], chance.choice(("", "<|return|>" if last[0] == "final" else "<|call|>")))
        expected = harmony_reference(text, takes_calls=takes_calls)
        for pieces in ([text], list(text), cut(text, chance)):
            assert split(HarmonySplitter(takes_calls=takes_calls), pieces) == expected, (text, pieces)


def test_an_answer_outside_of_the_format_is_the_answer() -> None:
    for text in ("Hello", "Hello <|end|>", " yes", "a" * 5_000):
        assert split(HarmonySplitter(takes_calls=False), list(text)) == ("", text.removesuffix("<|end|>"))


def test_an_answer_that_was_cut_ends_in_its_channel() -> None:
    whole = harmony([("analysis", "hm"), ("final", "yes, of course")], "")
    assert split(HarmonySplitter(takes_calls=False), [whole[:30]]) == ("", "")
    assert split(HarmonySplitter(takes_calls=False), [whole[:-9]]) == ("hm", "yes, ")

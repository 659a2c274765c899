"""The marks between which families of models think, and where an answer is when it begins.

A form is recognised by its closing mark in the checkpoint's own chat template. To add a form, add an entry to FORMS,
and a template of the family to tests/control_plane/text/thinking/templates.py.

    [opening] thinking closing answer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Begins = Literal["thinking", "undecided", "answer"]
"""Where an answer begins: the prompt ends within the thinking; the answer's first text decides; the prompt ends it."""


@dataclass(frozen=True)
class ThinkingForm:
    name: str
    opening: str
    closing: str


THINK = ThinkingForm("think", "<think>", "</think>")
"""DeepSeek-R1 and V3.1, Qwen3, QwQ, GLM 4.5, MiniMax, Nemotron, Kimi K2 Thinking."""
FORMS = (
    THINK,
    ThinkingForm("mistral", "[THINK]", "[/THINK]"),
    ThinkingForm("seed", "<seed:think>", "</seed:think>"),
    ThinkingForm("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


def form_of(chat_template: str) -> ThinkingForm | None:
    """Return the form in which a template's model thinks; None if it does not."""
    return next((form for form in FORMS if form.closing in chat_template), None)


def is_harmony(chat_template: str, control_ids: Mapping[str, int]) -> bool:
    """Return whether a template's model answers in messages with channels, as gpt-oss does."""
    return all(mark in chat_template and mark in control_ids for mark in ("<|channel|>", "<|message|>"))


def form_named(name: str) -> ThinkingForm:
    """Return the form with this name, which is one of ours."""
    return next(form for form in FORMS if form.name == name)


def begins(form: ThinkingForm, end_of_prompt: str) -> Begins:
    """Return where an answer begins after a prompt with this end."""
    end = end_of_prompt.rstrip()
    if end.endswith(form.opening):
        return "thinking"
    return "answer" if end.endswith(form.closing) else "undecided"

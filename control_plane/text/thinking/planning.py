"""Prepares a chat whose model thinks: where its answer begins, and what the engine must know of the thinking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from control_plane.generation import ModelFacts
from control_plane.text.request import GenerationOptions
from control_plane.text.thinking import harmony
from control_plane.text.thinking.forms import Begins, ThinkingForm, begins, form_named, form_of, is_harmony
from control_plane.text.thinking.splitter import Split, ThinkingSplitter
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tools.harmony import FINAL, MARKS, NEXT
from tandem_engine.thinking import Thinking
from tandem_runtime.errors import Unsupported

_HARMONY = "harmony"
_END_TOKENS = 32
"""Tokens at a prompt's end that are looked at."""


class ThinkingPlan(msgspec.Struct, frozen=True):
    """How the answer of a chat is split."""

    form: str
    begins: Begins
    shown_ids: tuple[int, ...] = ()
    """Marks that are control tokens: the detokenizer returns them by name."""
    takes_calls: bool = False


class Splitter(Protocol):
    """Separates the text of one choice; see `ThinkingSplitter`."""

    @property
    def is_thinking(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def has_thought(self) -> bool: ...

    def push(self, text: str) -> Split: ...

    def flush(self) -> Split: ...


def plan_thinking(
    model: ModelFacts,
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    options: GenerationOptions,
    *,
    takes_calls: bool,
) -> tuple[ThinkingPlan | None, Thinking | None]:
    """Return how to split the answer to a rendered chat, and the engine's part of it; None for what is not needed.

    `takes_calls`: the grammar is that of tool calls. Raise Unsupported if the engine cannot find the thinking's end.
    """
    if is_harmony(model.chat_template, tokenizer.control_ids):
        return _plan_harmony(tokenizer, options, takes_calls=takes_calls)
    form = form_of(model.chat_template)
    if form is None:
        return None, None
    end = tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False)
    plan = ThinkingPlan(form.name, begins(form, end), _ids((form.opening, form.closing), tokenizer), takes_calls)
    if plan.begins == "answer" or not _needs_engine(options):
        return plan, None
    return plan, _thinking(form, plan.begins, tokenizer, options)


def splitter_of(plan: ThinkingPlan | None) -> Splitter | None:
    """Return a new splitter for one choice; None if all its text is the answer's."""
    if plan is None or plan.begins == "answer":
        return None
    if plan.form == _HARMONY:
        return harmony.HarmonySplitter(takes_calls=plan.takes_calls)
    return ThinkingSplitter(form_named(plan.form), plan.begins)


def stop_ids_of(model: ModelFacts, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the ids that end an answer of this model beside its end tokens."""
    if not is_harmony(model.chat_template, tokenizer.control_ids):
        return ()
    return _ids(harmony.STOPS, tokenizer)


def _plan_harmony(
    tokenizer: TextTokenizer, options: GenerationOptions, *, takes_calls: bool
) -> tuple[ThinkingPlan, Thinking | None]:
    plan = ThinkingPlan(_HARMONY, "thinking", _ids(MARKS, tokenizer), takes_calls)
    if not _needs_engine(options):
        return plan, None
    if takes_calls:  # the grammar of calls begins with the thinking: they are messages like it
        if options.max_thinking_tokens is not None:
            raise Unsupported(
                "thinking_token_budget cannot be used with tools of this model, whose calls are in the format of its "
                "thinking; leave one of them out",
                field="thinking_token_budget",
            )
        return plan, None
    end, forced = (harmony.mark_ids(text, tokenizer.control_ids, tokenizer.mark_ids) for text in (FINAL, NEXT + FINAL))
    return plan, Thinking(tuple(end), tuple(forced), None, options.max_thinking_tokens)


def _needs_engine(options: GenerationOptions) -> bool:
    return options.grammar is not None or options.max_thinking_tokens is not None


def _thinking(form: ThinkingForm, where: Begins, tokenizer: TextTokenizer, options: GenerationOptions) -> Thinking:
    opening, closing = (tokenizer.mark_ids(mark) for mark in (form.opening, form.closing))
    if len(closing) != 1 or (where == "undecided" and len(opening) != 1):
        field = "thinking_token_budget" if options.grammar is None else options.grammar_field
        raise Unsupported(
            f"{field} needs a model whose marks {form.opening} and {form.closing} are tokens of their own, and this "
            "one writes them as text; leave it out, or send chat_template_kwargs {enable_thinking: false}",
            field=field,
        )
    start = opening[0] if where == "undecided" else None
    return Thinking(tuple(closing), (), start, options.max_thinking_tokens)


def _ids(marks: Sequence[str], tokenizer: TextTokenizer) -> tuple[int, ...]:
    known = tokenizer.control_ids
    return tuple(known[mark] for mark in marks if mark in known)

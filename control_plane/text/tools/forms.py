"""The forms in which families of models write tool calls.

A form is recognised by how the checkpoint's own chat template renders a call (`template_traits.py`). To add a form, add
an entry to FORMS, and a template of the family to tests/control_plane/text/tools/templates.py.

    first call between call ... last          call = {"name": "...", "<arguments_key>": {...}}
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolForm:
    name: str
    openings: tuple[str, ...]
    """After one of these, the rest of the answer is calls. Names of control tokens stand for the tokens."""
    firsts: tuple[str, ...]
    """Texts that may precede the first call, opening included."""
    between: str
    last: str
    arguments_key: str = "arguments"
    begins_answer: bool = False
    """Whether calls are the whole answer: an opening after other text is then text."""
    trace: re.Pattern[str] | None = None
    """Matches a call to `probe` as templates of this family render it; None for our own form."""

    @property
    def looks_like_json(self) -> bool:
        return self.openings[0].startswith("{")


HERMES = ToolForm(
    "hermes",
    openings=("<tool_call>",),
    firsts=("<tool_call>\n",),
    between="\n</tool_call>\n<tool_call>\n",
    last="\n</tool_call>",
    trace=re.compile(r'<tool_call>\s*\{\s*"(name": "probe"|arguments": )'),
)
LLAMA3 = ToolForm(
    "llama3",
    openings=("{", "<|python_tag|>"),
    firsts=("", "<|python_tag|>"),
    between="; ",
    last="",
    arguments_key="parameters",
    begins_answer=True,
    trace=re.compile(r'\{"name": "probe", "parameters": '),
)
MISTRAL = ToolForm(
    "mistral",
    openings=("[TOOL_CALLS]",),
    firsts=("[TOOL_CALLS][", "[TOOL_CALLS] ["),
    between=", ",
    last="]",
    trace=re.compile(r'\[TOOL_CALLS\]\s*\[\{"name": "probe", "arguments": '),
)
GENERIC = ToolForm(
    "json",
    openings=('{"tool_calls"',),  # the grammar leads a model that begins so to a call
    firsts=('{"tool_calls": [',),
    between=", ",
    last="]}",
    begins_answer=True,
)
HARMONY = ToolForm(
    "harmony",
    openings=("<|call|>",),  # written by HarmonySplitter before each call; the model ends a call with this mark
    firsts=("<|call|>",),
    between="",
    last="",
    trace=re.compile(r"to=functions\.probe\s*<\|channel\|>commentary|commentary to=functions\.probe"),
)
"""gpt-oss; `control_plane/text/thinking/harmony.py` reads and writes the format."""
FORMS = (HERMES, LLAMA3, MISTRAL, HARMONY)
CONTROL_TOKENS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Parts of forms that are control tokens in some vocabularies and text in others."""
OFTEN_ABSENT = ("<|python_tag|>",)
"""Openings that are dropped if they are not control tokens of the model."""


def form_named(name: str) -> ToolForm:
    """Return the form with this name, which is one of ours."""
    return next(form for form in (*FORMS, GENERIC) if form.name == name)


def form_written_in(text: str) -> ToolForm | None:
    """Return the form of the call to `probe` in `text`, a rendered template; None if none matches."""
    return next((form for form in FORMS if form.trace is not None and form.trace.search(text)), None)

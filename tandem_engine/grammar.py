"""Describes what the text of an answer must look like."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

MAX_GRAMMAR_CHARACTERS = 65_536


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constrains an answer's text from its first token to its end.

    Raises ValueError that names the field, its value and its limits.
    """

    kind: GrammarKind
    text: str = ""
    """A JSON Schema, a regular expression of Rust's `regex` or a Lark grammar; empty for `json_object`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"grammar.kind is {self.kind!r}, must be one of {', '.join(get_args(GrammarKind))}")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"grammar has {len(self.text):,} characters, must have {MAX_GRAMMAR_CHARACTERS:,} at the most"
            )
        if bool(self.text) == (self.kind == "json_object"):
            raise ValueError(f"grammar.text has {len(self.text):,} characters, which does not go with {self.kind}")

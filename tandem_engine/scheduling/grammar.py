"""What must the text of an answer look like?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

MAX_GRAMMAR_CHARACTERS = 65_536


@dataclass(frozen=True)
class Grammar:
    """What constrains an answer's text, from its first token to its end; refuses nonsense as it is built.

    Raises ValueError that names the field, its value and its limits.
    """

    kind: GrammarKind
    text: str = ""
    """A JSON Schema, a regular expression of Rust's `regex` or a Lark grammar; of `json_object` nothing."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"grammar.kind is {self.kind!r}, must be one of {', '.join(get_args(GrammarKind))}")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise ValueError(
                f"grammar has {len(self.text):,} characters, must have {MAX_GRAMMAR_CHARACTERS:,} at the most"
            )
        if bool(self.text) == (self.kind == "json_object"):
            raise ValueError(f"grammar.text has {len(self.text):,} characters, which does not go with {self.kind}")

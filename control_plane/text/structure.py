"""Checks before admission that the engine can enforce a grammar.

The check uses the engine's library and limits, over a vocabulary of the 256 bytes. So it needs no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem_engine.grammar import Grammar
from tandem_engine.scheduling.grammar_source import GrammarUnusable, limits, source
from tandem_runtime.errors import InvalidRequest, Unsupported

_MAX_KNOWN = 256
_TRIED_BYTES = 8
"""Bytes to try: some grammars turn out to be too complex only after their first characters."""
_NO_MATCH = "no text matches it"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")


class GrammarCheck:
    """Checks grammars, and remembers those that passed."""

    def __init__(self) -> None:
        self._passed: OrderedDict[Grammar, None] = OrderedDict()

    def check(self, grammar: Grammar, field: str) -> None:
        """Raise Unsupported naming unsupported keywords, or InvalidRequest with any other problem.

        `field` is the request's field that has the grammar.
        """
        if grammar not in self._passed:
            _check(grammar, field)
            self._passed[grammar] = None
            if len(self._passed) > _MAX_KNOWN:
                self._passed.popitem(last=False)
        self._passed.move_to_end(grammar)


def _check(grammar: Grammar, field: str) -> None:
    problem = _problem(grammar)
    if not problem:
        return
    if found := _UNIMPLEMENTED.search(problem):
        keywords = ", ".join(json.loads(found[1]))
        raise Unsupported(f"{field} has keywords that are not supported here: {keywords}; remove them", field=field)
    raise InvalidRequest(f"{field} cannot be used: {problem}; change or simplify it", field=field)


def _problem(grammar: Grammar) -> str:
    try:
        matcher = LLMatcher(_bytes(), source(grammar), log_level=0, limits=limits())
    except GrammarUnusable as error:
        return str(error)
    num_tried = 0
    while num_tried < _TRIED_BYTES and not matcher.is_error() and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & (1 << _END) - 1
        if not mask:
            break
        matcher.consume_tokens([(mask & -mask).bit_length() - 1])
        num_tried += 1
    if not matcher.is_error():
        matcher.rollback(num_tried)  # the engine rolls back after drafts; some lexemes cannot
    problem = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return _NO_MATCH if problem == "NoExtensionBias" else problem


_END = 256


class _Bytes:
    """A vocabulary of all bytes and an end token, in llguidance's form."""

    eos_token_id = _END
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(_END)), b"<end>")
    special_token_ids: Sequence[int] = (_END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))

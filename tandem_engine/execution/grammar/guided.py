"""Computes masks of allowed tokens with llguidance."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tandem_engine.execution.grammar.matcher import GrammarFailed, MakeMatcher
from tandem_engine.execution.grammar.native import NOTHING_FITS, NativeGrammars, Unavailable
from tandem_engine.grammar import Grammar
from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.grammar_source import LIMITS, GrammarUnusable, limits, source

log = logging.getLogger(__name__)
_WORD = np.dtype("<i4")


class Guide:
    """Compiles grammars over one vocabulary."""

    def __init__(
        self,
        tokenizer_path: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        op_library: ctypes.CDLL | None = None,
    ) -> None:
        """Read a tokenizer.json: some 0.2 s per 100,000 tokens. With `op_library`, its threads compute masks."""
        tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._ends = _Ends(vocab_size, eos_token_ids)
        self._native = _native(op_library, self._tokenizer, eos_token_ids)

    def __call__(self, grammar: Grammar) -> MakeMatcher:
        """Compile a grammar, and the part of its lexer that the first mask needs; all matchers share or copy it."""
        try:
            text = source(grammar)
        except GrammarUnusable as error:
            raise GrammarFailed(str(error)) from error
        if self._native is not None:
            return self._native.compile(text).matcher
        compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        if compiled.is_error():
            raise GrammarFailed(f"the grammar of this request cannot be used: {compiled.get_error()}")
        compiled.deep_copy().compute_bitmask()
        return lambda: _GuidedMatcher(compiled.deep_copy(), self._ends)


def _native(
    op_library: ctypes.CDLL | None, tokenizer: LLTokenizer, eos_token_ids: Sequence[int]
) -> NativeGrammars | None:
    if op_library is None:
        return None
    try:
        return NativeGrammars(op_library, tokenizer, eos_token_ids, LIMITS)
    except Unavailable as error:
        log.warning("grammar masks are computed in Python: %s", error)
        return None


class _Ends:
    """The bits of end tokens in a mask of bytes."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        bits: dict[int, int] = {}
        for token_id in eos_token_ids:
            bits[token_id // 8] = bits.get(token_id // 8, 0) | 1 << token_id % 8
        self._bits = tuple(bits.items())
        self._nothing = bytes(4 * -(-vocab_size // 32))

    def are_in(self, mask: bytes) -> bool:
        """Whether the mask allows an end token."""
        for index, bits in self._bits:  # noqa: SIM110 - any() takes four times as long
            if mask[index] & bits:
                return True
        return False

    def is_nothing(self, mask: bytes) -> bool:
        return mask == self._nothing


class _GuidedMatcher:
    builder = None

    def __init__(self, matcher: LLMatcher, ends: _Ends) -> None:
        self._matcher = matcher
        self._ends = ends
        self._new_tokens: list[int] = []
        self._draft_tokens: list[int] = []

    def request_masks(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> None:
        self._new_tokens, self._draft_tokens = new_tokens, list(draft_tokens)

    def masks(self) -> list[Words]:
        if not self._matcher.consume_tokens(self._new_tokens):
            raise GrammarFailed(f"the grammar cannot be followed here: {self._matcher.get_error()}")
        # Compute the first mask last: llguidance caches the newest mask, and after a rollback may use it for another
        # position with the same number of words. From the position of the first mask, answers only move forward.
        behind = self._masks_behind(self._draft_tokens) if self._draft_tokens else []
        return [self._mask(), *behind]

    def _masks_behind(self, draft_tokens: list[int]) -> list[Words]:
        # Tokens behind a forbidden draft are never sampled.
        allowed = draft_tokens[: self._matcher.validate_tokens(draft_tokens)]
        masks = []
        for draft in allowed:
            if not self._matcher.consume_tokens([draft]):
                raise GrammarFailed(f"an allowed token was rejected: {self._matcher.get_error()}")
            masks.append(self._mask())
        if allowed and not self._matcher.rollback(len(allowed)):
            raise GrammarFailed(f"the grammar cannot roll back: {self._matcher.get_error()}")
        return masks

    def _mask(self) -> Words:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar has no continuation: {self._matcher.get_error()}")
        # If no token can continue an incomplete answer, llguidance allows its end.
        if self._ends.is_nothing(mask) or (self._ends.are_in(mask) and not self._matcher.is_accepting()):
            raise GrammarFailed(NOTHING_FITS)
        return np.frombuffer(mask, _WORD)

"""How does llguidance tell which tokens a grammar allows?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.execution.grammar.matcher import GrammarFailed, Matcher
from engine.ops.sampling import Words
from engine.scheduling.grammar import Grammar
from engine.scheduling.grammar_source import GrammarUnusable, limits, source

_MAX_GRAMMARS = 64
"""Compiled ones, the least recently used of which are forgotten."""


class Guide:
    """Makes matchers over one vocabulary. A grammar is compiled once, however many requests come with it."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read a tokenizer.json: some 0.2 s for each 100,000 tokens."""
        tokenizer_json = tokenizer_path.read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        ends = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in eos_token_ids:
            ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._ends: Words = ends.view(np.int32)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def __call__(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the grammar's beginning; raises GrammarFailed."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > _MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return _GuidedMatcher(self._compiled[grammar].deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, source(grammar), log_level=0, limits=limits())
        except GrammarUnusable as error:
            raise GrammarFailed(str(error)) from error
        if matcher.is_error():
            raise GrammarFailed(f"the grammar of this request cannot be used: {matcher.get_error()}")
        return matcher


class _GuidedMatcher:
    def __init__(self, matcher: LLMatcher, ends: Words) -> None:
        """`ends` is the mask of the tokens that end an answer."""
        self._matcher = matcher
        self._ends = ends
        self._num_words = len(ends)
        self._num_consumed = 0

    def masks(self, answer: Sequence[int], draft_tokens: Sequence[int]) -> list[Words]:
        new = list(answer[self._num_consumed :])
        if not self._matcher.consume_tokens(new):
            raise GrammarFailed(f"the grammar cannot be followed here: {self._matcher.get_error()}")
        self._num_consumed += len(new)
        # What follows a draft that is not allowed is never drawn.
        num_allowed = self._matcher.validate_tokens(list(draft_tokens)) if draft_tokens else 0
        masks = [self._mask()]
        for draft in draft_tokens[:num_allowed]:
            if not self._matcher.consume_tokens([draft]):
                raise GrammarFailed(f"a token that was allowed is not: {self._matcher.get_error()}")
            masks.append(self._mask())
        if num_allowed and not self._matcher.rollback(num_allowed):
            raise GrammarFailed(f"the grammar cannot go back: {self._matcher.get_error()}")
        return masks

    def _mask(self) -> Words:
        mask: Words = np.frombuffer(self._matcher.compute_bitmask(), "<i4", self._num_words)
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar has no way on: {self._matcher.get_error()}")
        # Where no token continues the answer llguidance lets it end, although it is not complete.
        if not mask.any() or ((mask & self._ends).any() and not self._matcher.is_accepting()):
            raise GrammarFailed("the grammar has no way on: no token of this model's vocabulary continues the answer")
        return mask

"""Computes masks without the interpreter: the op library's threads call llguidance's C functions.

    our C++ (tandem_engine/ops/cpu/cpp/masks.hpp)     consumes tokens and computes masks, answer by answer, between ops
    llguidance's C interface, in its wheel            parser/llguidance.h of its sources; the structures here mirror it

llguidance's Python classes use the same parser and give the same masks, bit for bit.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import llguidance._lib
import numpy as np
from llguidance import LLTokenizer

from tandem_engine.execution.grammar.matcher import GrammarFailed, Matcher
from tandem_engine.ops.cpu.library import GrammarCalls, MaskRow
from tandem_engine.ops.sampling import Words
from tandem_engine.scheduling.grammar_source import LimitValues

_TRIED_VERSIONS = ("1.9.0", "1.9.1")
"""Versions of llguidance that passed `tests/tandem_engine/execution/test_native_masks.py`. The structures below have no
size field, so a release that moves a field would corrupt memory. Other versions compute masks through Python."""
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_USUAL_TOKENS = 16
"""Tokens per call, drafts included, that fit without a new allocation."""
_MAX_USED = 16
"""Matchers per grammar that are kept between answers; some tens of kilobytes each."""
_CALLS = ("consume_tokens", "validate_tokens", "compute_mask_into", "is_accepting", "rollback")
_Tokenize = ctypes.CFUNCTYPE(
    _SIZE, _POINTER, ctypes.POINTER(ctypes.c_ubyte), _SIZE, ctypes.POINTER(ctypes.c_uint32), _SIZE
)
_, _NOT_FOLLOWED, _NO_WAY_ON, _NOTHING_FITS, _DRAFT_REFUSED, _NOT_BACK = range(6)
_MESSAGES = {
    _NOT_FOLLOWED: "the grammar cannot be followed here",
    _NO_WAY_ON: "the grammar has no continuation",
    _DRAFT_REFUSED: "an allowed token was rejected",
    _NOT_BACK: "the grammar cannot roll back",
}
NOTHING_FITS = "the grammar has no continuation: no token of this model's vocabulary continues the answer"


class _Limits(ctypes.Structure):
    _fields_ = [
        ("max_items_in_row", _SIZE),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", _SIZE),
        ("max_lexer_states", _SIZE),
        ("max_grammar_size", _SIZE),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    ]


class _MatcherInit(ctypes.Structure):
    _fields_ = [
        ("tokenizer", _POINTER),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _Limits),
    ]


class _TokenizerInit(ctypes.Structure):
    _fields_ = [
        ("struct_size", _SIZE),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", _POINTER),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _POINTER),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", _POINTER),
        ("slices", _POINTER),
        ("tok_eos_extra", _POINTER),
        ("tok_eos_extra_count", ctypes.c_uint32),
    ]


class NativeGrammars:
    """Compiles grammars, and computes the masks of several answers at once. A second thread may compile."""

    _begun: ClassVar[tuple[Sequence[Matcher], array[int]] | None] = None
    """The data that the op library's threads may use: it must live until `finish`, even if its creator does not."""

    def __init__(
        self, library: ctypes.CDLL, tokenizer: LLTokenizer, eos_token_ids: Sequence[int], limits: LimitValues
    ) -> None:
        """`library` is the op library. Raises Unavailable if llguidance has no C interface that is known here."""
        self._library = library
        self._llg = _interface()
        self._limits = limits
        self._tokenizer = self._new_tokenizer(tokenizer, eos_token_ids)
        self.num_words = -(-tokenizer.vocab_size // 32)
        self._ends = np.zeros(self.num_words, np.uint32)
        for token_id in eos_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        functions = [ctypes.cast(getattr(self._llg, f"llg_matcher_{name}"), _POINTER) for name in _CALLS]
        self._calls = GrammarCalls(*functions, self._ends.ctypes.data, self.num_words)
        self._calls_address = ctypes.addressof(self._calls)

    def compile(self, source: str) -> Beginning:
        """Return the start of all answers to a grammar. Raises GrammarFailed."""
        init = _MatcherInit()
        self._llg.llg_constraint_init_set_defaults(ctypes.byref(init), self._tokenizer)
        init.log_stderr_level = 0
        for name, value in self._limits.items():
            setattr(init.limits, name, value)
        beginning = Beginning(self, self._llg.llg_new_matcher(ctypes.byref(init), b"guidance", source.encode()))
        if error := self.error(beginning.handle):
            raise GrammarFailed(f"the grammar of this request cannot be used: {error}")
        self._compute_first_mask(beginning.handle)  # copies get the mask, or its error
        return beginning

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """See `MaskBuilder`; earlier masks are finished first."""
        rows = array("Q", [matcher.address for matcher in matchers if isinstance(matcher, NativeMatcher)])
        self._library.tandem_begin_masks(self._calls_address, rows.buffer_info()[0], len(rows))
        NativeGrammars._begun = matchers, rows

    def finish(self) -> None:
        self._library.tandem_finish_masks()
        NativeGrammars._begun = None

    def copy(self, handle: int) -> int:
        made: int = self._llg.llg_clone_matcher(handle)
        return made

    def reset(self, handle: int) -> None:
        """Reset a matcher to its start, and compute the mask there: see cpp/masks.hpp."""
        self._llg.llg_matcher_reset(handle)
        self._compute_first_mask(handle)

    def _compute_first_mask(self, handle: int) -> None:
        words = np.empty(self.num_words, np.int32)
        self._llg.llg_matcher_compute_mask_into(handle, words.ctypes.data, words.nbytes)

    def free(self, handle: int) -> None:
        self._llg.llg_free_matcher(handle)

    def error(self, handle: int) -> str:
        found = self._llg.llg_matcher_get_error(handle)
        return found.decode(errors="replace") if found else ""

    def _new_tokenizer(self, tokenizer: LLTokenizer, eos_token_ids: Sequence[int]) -> int:
        words = [_bytes_of(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)]
        lengths = np.array([len(word) for word in words], np.uint32)
        more_ends = np.array(eos_token_ids[1:], np.uint32)
        self._tokenize = _Tokenize(_tokenize_with(tokenizer))
        remembered = self._library.tandem_remembered_tokens(ctypes.cast(self._tokenize, _POINTER))
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=len(words),
            tok_eos=eos_token_ids[0],
            token_lens=lengths.ctypes.data,
            token_bytes=b"".join(words),
            tokenize_fn=ctypes.cast(self._library.tandem_tokenize, _POINTER),
            tokenize_user_data=remembered,
            tok_eos_extra=more_ends.ctypes.data if len(more_ends) else None,
            tok_eos_extra_count=len(more_ends),
        )
        error = ctypes.create_string_buffer(1024)
        made: int | None = self._llg.llg_new_tokenizer_v2(ctypes.byref(init), error, len(error))
        if not made:
            raise Unavailable(f"llguidance refuses the vocabulary: {error.value.decode(errors='replace')}")
        return made


class Unavailable(Exception):
    """Masks need llguidance's Python classes here; the message names the reason."""


class Beginning:
    """The start of all answers to one grammar. Keeps some used matchers, because their lexers have cached states."""

    def __init__(self, builder: NativeGrammars, handle: int) -> None:
        self.builder = builder
        self.handle = handle
        self._used: deque[int] = deque()

    def __del__(self) -> None:
        for handle in (self.handle, *self._used):
            self.builder.free(handle)

    def matcher(self) -> NativeMatcher:
        """Return a matcher with its own lexer, so two matchers can be used at the same time."""
        try:
            handle = self._used.pop()
        except IndexError:
            return NativeMatcher(self, self.fresh())
        return NativeMatcher(self, handle, is_used=True)

    def fresh(self) -> int:
        return self.builder.copy(self.handle)

    def give_back(self, handle: int, *, is_whole: bool) -> None:
        if not is_whole or len(self._used) >= _MAX_USED:
            self.builder.free(handle)
        else:
            self.builder.reset(handle)
            self._used.append(handle)


class NativeMatcher:
    """Implements `Matcher`; its builder computes the masks."""

    def __init__(self, beginning: Beginning, handle: int, *, is_used: bool = False) -> None:
        self._beginning = beginning
        self.builder = beginning.builder
        self._row = MaskRow(matcher=handle)
        self.address = ctypes.addressof(self._row)
        """Address of the request and its result."""
        self._is_used = is_used
        self._answer: list[int] = []
        self._make_room(_USUAL_TOKENS, 0)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._beginning.give_back(self._row.matcher, is_whole=self._row.status == 0)

    def request_masks(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> None:
        num_new, num_drafts = len(new_tokens), len(draft_tokens)
        self._answer += new_tokens
        if num_new + num_drafts > len(self._tokens) or num_drafts >= len(self._masks):
            self._make_room(num_new + num_drafts, num_drafts)
        self._tokens[:num_new] = new_tokens  # type: ignore[assignment]  # numbers too
        if num_drafts:
            self._tokens[num_new : num_new + num_drafts] = list(draft_tokens)
        self._row.num_new, self._row.num_drafts = num_new, num_drafts

    def masks(self) -> Sequence[Words]:
        if self._row.status and self._is_used:
            self._start_over()
        status = self._row.status
        if status == _NOTHING_FITS:
            raise GrammarFailed(NOTHING_FITS)
        if status:
            raise GrammarFailed(f"{_MESSAGES[status]}: {self.builder.error(self._row.matcher)}")
        return self._masks[: self._row.num_masks]

    def _start_over(self) -> None:
        """Try again with a new lexer: states that other answers left in the old one count towards its limits."""
        self._beginning.give_back(self._row.matcher, is_whole=False)
        self._row.matcher, self._is_used = self._beginning.fresh(), False
        drafts = self._tokens[self._row.num_new : self._row.num_new + self._row.num_drafts]
        answer, self._answer = self._answer, []
        self.request_masks(answer, drafts)
        self.builder.begin([self])
        self.builder.finish()

    def _make_room(self, num_tokens: int, num_drafts: int) -> None:
        self._tokens = (ctypes.c_uint32 * max(_USUAL_TOKENS, num_tokens))()
        masks = np.empty((1 + num_drafts, self.builder.num_words), np.int32)
        self._masks: list[Words] = list(masks)
        self._row.tokens, self._row.masks = ctypes.addressof(self._tokens), masks.ctypes.data


def _interface() -> ctypes.CDLL:
    installed = version("llguidance")
    if installed not in _TRIED_VERSIONS:
        tried = " and ".join(_TRIED_VERSIONS)
        raise Unavailable(f"the C structures of llguidance {installed} were not tried, those of {tried} were")
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "llg_new_tokenizer_v2": (_POINTER, (_POINTER, ctypes.c_char_p, _SIZE)),
        "llg_constraint_init_set_defaults": (None, (_POINTER, _POINTER)),
        "llg_new_matcher": (_POINTER, (_POINTER, ctypes.c_char_p, ctypes.c_char_p)),
        "llg_clone_matcher": (_POINTER, (_POINTER,)),
        "llg_free_matcher": (None, (_POINTER,)),
        "llg_matcher_reset": (ctypes.c_int32, (_POINTER,)),
        "llg_matcher_get_error": (ctypes.c_char_p, (_POINTER,)),
        "llg_matcher_compute_mask_into": (ctypes.c_int32, (_POINTER, _POINTER, _SIZE)),
    }
    try:
        llg = ctypes.CDLL(str(llguidance._lib.__file__))
        for name, (result, arguments) in types.items():
            function = getattr(llg, name)
            function.restype, function.argtypes = result, arguments
        for name in _CALLS:
            getattr(llg, f"llg_matcher_{name}")
    except (OSError, AttributeError) as error:
        raise Unavailable(f"llguidance {installed} has no C interface here: {error}") from error
    return llg


def _bytes_of(tokenizer: LLTokenizer, token_id: int) -> bytes:
    """Return a token's bytes in the trie; a control token starts with a byte that no text has."""
    text = tokenizer.decode_bytes([token_id])
    if tokenizer.is_special_token(token_id):
        return b"\xff" + text
    return b"" if text == b"<[%d]>" % token_id else text


def _tokenize_with(tokenizer: LLTokenizer) -> Callable[..., int]:
    def tokenize(_: Any, text: Any, num_bytes: int, tokens: Any, room: int) -> int:
        found = tokenizer.tokenize_bytes(ctypes.string_at(text, num_bytes))
        for index, token_id in enumerate(found[:room]):
            tokens[index] = token_id
        return len(found)

    return tokenize

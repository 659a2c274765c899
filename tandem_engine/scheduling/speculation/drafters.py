"""What can be guessed from a request's own text, and from what the same account was answered before?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.ngrams import UNSEEN, NGramIndex, TokenBytes

_MAX_INDEXED = 256  # tokens per call, under 1 us each: a long prompt is taken in by and by
_NUM_PROMPT_TOKENS = 12
_MAX_TEXT_TOKENS = 16_384
_MAX_TOKENS = 65_536  # kept in all, some 300 bytes each with their index
_SEPARATOR = -1


class Guess(NamedTuple):
    """Tokens that may follow a request's."""

    token_ids: Sequence[int]
    num_agreed: int
    """So many tokens before them are the same where they come from."""
    firmness: Sequence[int]
    """Of each token: CHANGED, UNSEEN or FIRM."""

    def cut(self, num_tokens: int) -> Guess:
        return Guess(self.token_ids[:num_tokens], self.num_agreed, self.firmness[:num_tokens])


class Drafter(Protocol):
    """One way to guess; keeps what it needs of a request until `forget`."""

    def guess(self, request: Request, max_tokens: int) -> Guess | None:
        """Return from one to `max_tokens` tokens that may follow, or None."""
        ...

    def forget(self, request: Request) -> None:
        """The request is over; its tokens may be of use to others."""
        ...


class OwnText:
    """Prompt and answer: what followed the last tokens where they stood before (prompt lookup; Saxena, 2023)."""

    def __init__(self) -> None:
        self._texts: dict[Request, TokenBytes] = {}

    def guess(self, request: Request, max_tokens: int) -> Guess | None:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = TokenBytes()
        match = text.find(request.token_ids)
        if match is None:
            return None
        token_ids = request.token_ids[match.end : match.end + max_tokens]
        if len(token_ids) < max_tokens:  # the text repeats itself, and goes on repeating
            token_ids = (token_ids * max_tokens)[:max_tokens]
        return Guess(token_ids, match.num_agreed, [UNSEEN] * max_tokens)

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)


@dataclass
class _Text:
    """Answers one after the other, each behind the last tokens of its prompt."""

    token_ids: list[int] = field(default_factory=list)
    index: NGramIndex = field(default_factory=NGramIndex)

    def add(self, token_ids: Sequence[int]) -> None:
        self.token_ids += [_SEPARATOR, *token_ids[-_MAX_TEXT_TOKENS // 2 :]]
        if len(self.token_ids) > _MAX_TEXT_TOKENS:
            self.token_ids = self.token_ids[-_MAX_TEXT_TOKENS // 2 :]
            self.index = NGramIndex()


class EarlierAnswers:
    """What requests of the same account were answered lately: among equals the latest counts.

    Bounded in tokens; the account that was not served for longest is forgotten first. Accounts are told apart by the
    roots of their block hashes, so none sees another's. Who may not read all of the cache reads nothing here, and who
    may not leave all in it leaves nothing.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._texts: OrderedDict[BlockHash, _Text] = OrderedDict()
        self.num_tokens = 0

    def guess(self, request: Request, max_tokens: int) -> Guess | None:
        text = None if request.hash_root is None else self._texts.get(request.hash_root)
        if text is None or request.max_found_blocks is not None:
            return None
        guess = _look_up(text.index, text.token_ids, request.token_ids, max_tokens)
        if guess is None or _SEPARATOR not in guess.token_ids:
            return guess
        length = guess.token_ids.index(_SEPARATOR)
        return guess.cut(length) if length else None

    def forget(self, request: Request) -> None:
        has_answer = request.mode != "prefill" and request.num_generated_tokens > 0
        if request.hash_root is None or request.max_left_blocks is not None or not has_answer:
            return
        text = self._texts.setdefault(request.hash_root, _Text())
        self._texts.move_to_end(request.hash_root)
        self.num_tokens -= len(text.token_ids)
        text.add(request.token_ids[max(0, request.num_prompt_tokens - _NUM_PROMPT_TOKENS) :])
        self.num_tokens += len(text.token_ids)
        while self.num_tokens > self._max_tokens:
            _, oldest = self._texts.popitem(last=False)
            self.num_tokens -= len(oldest.token_ids)


def _look_up(index: NGramIndex, text: list[int], context: list[int], max_tokens: int) -> Guess | None:
    """Return what follows in `text` where it reads like the end of `context`, once all of it is indexed."""
    end = len(text) - 1  # something has to follow
    index.extend(text, min(end, index.num_indexed + _MAX_INDEXED))
    if index.num_indexed < end or (match := index.find(text, context)) is None:
        return None
    token_ids = text[match.end : match.end + max_tokens]
    firmness = index.firmness[match.end : match.end + max_tokens]
    firmness.extend([UNSEEN] * (len(token_ids) - len(firmness)))
    return Guess(token_ids, match.num_agreed, firmness)

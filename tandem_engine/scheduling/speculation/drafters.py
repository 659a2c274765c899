"""Finds draft tokens in a request's own text and in earlier answers to the same account.

Both drafters search for the last tokens of the request in a text and propose what followed there (prompt lookup
decoding; Saxena, 2023). A text is kept as bytes, 4 per token: `bytearray.rfind` reads some tokens per nanosecond, so a
text needs no index.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.request import Request

MAX_MATCH_TOKENS = 16
"""Tokens before a draft that are compared; a longer match is not more reliable."""
_TOKEN_BYTES = array("I").itemsize
_SEARCHED_TOKENS = (3, 2, 1)  # tokens at the end of a request that a place has to repeat, tried in this order
_NUM_CANDIDATES = 4  # latest places that are compared; the longest match of these is taken
_NUM_PROMPT_TOKENS = 12  # kept before each earlier answer, so that its beginning is found
_MAX_ACCOUNT_TOKENS = 8_192  # one search takes about 10 us
_MAX_TOKENS = 65_536
_SEPARATOR = b"\xff" * _TOKEN_BYTES


class Agreement(IntEnum):
    """What the other places propose in a token's stead; only places that proposed all tokens before it count."""

    ALONE = 0
    """There is no other place."""
    ALL = 1
    SOME = 2
    NONE = 3


class Draft(NamedTuple):
    """Tokens that may follow a request's."""

    token_ids: Sequence[int]
    num_matched: int
    """Tokens in a row before the draft that are the same in the request and in the text, at most MAX_MATCH_TOKENS."""
    agreements: Sequence[Agreement] = ()
    """Per token: whether the other places propose it too. Empty: no other place was looked at."""

    def cut(self, num_tokens: int) -> Draft:
        return Draft(self.token_ids[:num_tokens], self.num_matched, self.agreements[:num_tokens])


class Drafter(Protocol):
    """One source of drafts; keeps what it needs of a request until `forget`."""

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        """Return from one to `max_tokens` tokens that may follow, or None."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that is over."""
        ...


class OwnText:
    """Drafts from the prompt and the answer so far."""

    def __init__(self) -> None:
        self._texts: dict[Request, bytearray] = {}

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        text = self._texts.setdefault(request, bytearray())
        text += array("I", request.token_ids[len(text) // _TOKEN_BYTES :]).tobytes()
        places = find_matches(text, text[-MAX_MATCH_TOKENS * _TOKEN_BYTES :], len(text) - 1)

        def following(at: int) -> Sequence[int]:
            token_ids = request.token_ids[at : at + max_tokens]
            if len(token_ids) < max_tokens:  # the match overlaps the end: the text repeats itself
                token_ids = (token_ids * max_tokens)[:max_tokens]
            return token_ids

        return joined(places, following)

    def forget(self, request: Request) -> None:
        self._texts.pop(request, None)


class EarlierAnswers:
    """Drafts from the latest answers to requests of the same account.

    The root of the keys identifies account and space, so no account reads another's answers. A request that may not
    read the whole prefix cache reads no answers; a request that may not leave all its blocks there leaves no answer.
    Memory is bounded in tokens; the account whose last answer is oldest is dropped first.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_bytes = max_tokens * _TOKEN_BYTES
        self._texts: OrderedDict[BlockHash, bytearray] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // _TOKEN_BYTES

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        text = None if request.hash_root is None else self._texts.get(request.hash_root)
        if text is None or request.max_found_blocks is not None:
            return None
        places = find_matches(text, array("I", request.token_ids[-MAX_MATCH_TOKENS:]).tobytes(), len(text))

        def following(at: int) -> Sequence[int]:
            words = array("I", bytes(text[at * _TOKEN_BYTES : (at + max_tokens) * _TOKEN_BYTES]))
            token_ids = words.tolist()
            return token_ids[: token_ids.index(_SEPARATOR_ID)] if _SEPARATOR_ID in token_ids else token_ids

        return joined(places, following)

    def forget(self, request: Request) -> None:
        """Keep the answer of a request that is over, if the request allows that."""
        has_answer = request.mode != "prefill" and request.num_generated_tokens > 0
        if request.hash_root is None or request.max_left_blocks is not None or not has_answer:
            return
        first = max(0, request.num_prompt_tokens - _NUM_PROMPT_TOKENS, request.num_tokens - _MAX_ACCOUNT_TOKENS // 2)
        text = self._texts.setdefault(request.hash_root, bytearray())
        self._texts.move_to_end(request.hash_root)
        self._num_bytes -= len(text)
        text += _SEPARATOR + array("I", request.token_ids[first:]).tobytes()
        if len(text) > _MAX_ACCOUNT_TOKENS * _TOKEN_BYTES:
            del text[: len(text) - _MAX_ACCOUNT_TOKENS // 2 * _TOKEN_BYTES]
        self._num_bytes += len(text)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._texts.popitem(last=False)
            self._num_bytes -= len(oldest)


_SEPARATOR_ID = array("I", _SEPARATOR)[0]


def find_matches(text: bytes | bytearray, context: bytes | bytearray, end: int) -> list[tuple[int, int]]:
    """Return places in `text[:end]` that repeat the last tokens of `context`: what follows, tokens that match.

    The first is the index of the token behind the place. The longest match comes first, of equals the latest. `text`
    and `context` have 4 bytes per token.
    """
    places: list[tuple[int, int]] = []
    for num_searched in _SEARCHED_TOKENS:
        size = num_searched * _TOKEN_BYTES
        tail = context[-size:]
        at = text.rfind(tail, 0, end)
        while at >= 0 and len(places) < _NUM_CANDIDATES:
            if at % _TOKEN_BYTES == 0:
                places.append(((at + size) // _TOKEN_BYTES, _num_matched(text, at + size, context)))
            at = text.rfind(tail, 0, at + size - 1)
        if places:
            break
    return sorted(places, key=lambda place: -place[1])


def joined(places: Sequence[tuple[int, int]], following: Callable[[int], Sequence[int]]) -> Draft | None:
    """Return what follows the best place, and where the other places agree; None if nothing follows."""
    if not places:
        return None
    token_ids, *others = [following(at) for at, _ in places]
    agreements: list[Agreement] = []
    for position, token_id in enumerate(token_ids):
        others = [each for each in others if len(each) > position]
        same = [each for each in others if each[position] == token_id]
        if not others:
            agreements.append(Agreement.ALONE)
        elif same:
            agreements.append(Agreement.ALL if len(same) == len(others) else Agreement.SOME)
        else:
            agreements.append(Agreement.NONE)
        others = same
    return Draft(token_ids, places[0][1], agreements) if token_ids else None


def _num_matched(text: bytes | bytearray, end: int, context: bytes | bytearray) -> int:
    """Count the last tokens of `text[:end]` that are also the last ones of `context`."""
    size = min(MAX_MATCH_TOKENS * _TOKEN_BYTES, end, len(context))
    ours, others = int.from_bytes(text[end - size : end], "little"), int.from_bytes(context[-size:], "little")
    return (8 * size - (ours ^ others).bit_length()) // (8 * _TOKEN_BYTES)  # the last token is in the highest bits

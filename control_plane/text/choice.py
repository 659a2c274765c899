"""How do the tokens of one choice become text that ends where it must?

Tokens pass the detokenizer (whole characters only), then the stop strings (nothing that might be one). A token's
log probability leaves with the last character of that token, and not at all if the token lies behind the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.generation import AnswerEnd, Logprob, PositionLogprobs, TokenDelta
from control_plane.text.stop_strings import StopStrings
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tools.parser import CallParser, Parsed
from control_plane.text.tools.tool import CallDelta


@dataclass(frozen=True)
class TokenText:
    token_id: int
    bytes: bytes
    logprob: float

    @property
    def text(self) -> str:
        return self.bytes.decode(errors="replace")


@dataclass(frozen=True)
class TextLogprobs:
    """The chosen token, what else was likely, and where in the choice's text the token begins, in characters."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    text_offset: int


@dataclass(frozen=True)
class TextDelta:
    """New text and calls of one choice.

    `token_ids` are those that came since the last delta, whether their text left or not.
    """

    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprobs, ...] = ()
    finish_reason: AnswerEnd | None = None
    calls: tuple[CallDelta, ...] = ()
    is_cut_in_call: bool = False
    """Whether the answer ended within a call, by whatever ended it."""


class ChoiceText:
    """The text of one choice as it grows."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        context_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        calls: CallParser | None = None,
        shown_ids: Sequence[int] = (),
    ) -> None:
        """`context_ids`: tokens before the answer whose text the answer continues. Stop tokens are never text.

        `calls` takes tool calls out of the text; `shown_ids` are control tokens that it has to see.
        """
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(context_ids, shown_ids)
        self._calls = calls
        self._stop_strings = StopStrings(stop_strings)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_decoded = 0
        self._num_released = 0
        self._waiting: deque[tuple[int, TextLogprobs]] = deque()
        self.finish_reason: AnswerEnd | None = None

    @property
    def ended_by_stop_string(self) -> bool:
        return self._stop_strings.matched is not None

    def push(self, delta: TokenDelta) -> TextDelta:
        """Take new tokens of this choice and return what may leave."""
        text = "".join(self._take(token_id, logprobs) for token_id, logprobs in self._text_tokens(delta))
        if delta.finish_reason is not None:
            text += self._release(self._detokenizer.flush()) + self._count(self._stop_strings.flush())
        self.finish_reason = "stop" if self.ended_by_stop_string else delta.finish_reason
        logprobs, parsed = self._leaving_logprobs(), self._parsed(text)
        if self._calls is not None and self._calls.has_whole_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return TextDelta(
            *(delta.choice_index, parsed.text, delta.token_ids, logprobs, self.finish_reason, parsed.calls),
            is_cut_in_call=self._is_cut_in_call,
        )

    @property
    def _is_cut_in_call(self) -> bool:
        """Whether a call is half, or was cut off behind its opening; a model itself may leave it at that."""
        if self._calls is None or self.finish_reason is None:
            return False
        is_cut = self.finish_reason == "length" or self.ended_by_stop_string
        return self._calls.has_half_call or (is_cut and self._calls.is_within_call)

    def _parsed(self, text: str) -> Parsed:
        if self._calls is None:
            return Parsed(text)
        parsed = self._calls.push(text)
        if self.finish_reason is None:
            return parsed
        return Parsed(parsed.text + self._calls.flush().text, parsed.calls)

    def _text_tokens(self, delta: TokenDelta) -> list[tuple[int, PositionLogprobs | None]]:
        """Pair tokens with their log probabilities, less a stop token at the end."""
        logprobs = delta.logprobs or (None,) * len(delta.token_ids)
        pairs = list(zip(delta.token_ids, logprobs, strict=True))
        ends_with_stop = delta.finish_reason == "stop" and pairs and pairs[-1][0] in self._stop_token_ids
        return pairs[:-1] if ends_with_stop else pairs

    def _take(self, token_id: int, logprobs: PositionLogprobs | None) -> str:
        start = self._num_decoded
        text = self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        if logprobs is not None:
            self._waiting.append((self._num_decoded, self._with_text(logprobs, start)))
        return self._release(text)

    def _release(self, text: str) -> str:
        return self._count(self._stop_strings.push(text))

    def _count(self, released: str) -> str:
        self._num_released += len(released)
        return released

    def _leaving_logprobs(self) -> tuple[TextLogprobs, ...]:
        """Return the entries whose text has left; at the end, also of those that were cut short."""
        leaving = []
        while self._waiting:
            end, entry = self._waiting[0]
            cut_short = self.finish_reason is not None and entry.text_offset < self._num_released
            if end > self._num_released and not cut_short:
                break
            if self.ended_by_stop_string and entry.text_offset >= self._num_released:
                break
            leaving.append(entry)
            self._waiting.popleft()
        return tuple(leaving)

    def _with_text(self, logprobs: PositionLogprobs, text_offset: int) -> TextLogprobs:
        top = tuple(self._token_text(entry) for entry in logprobs.top)
        return TextLogprobs(self._token_text(logprobs.chosen), top, text_offset)

    def _token_text(self, entry: Logprob) -> TokenText:
        return TokenText(entry.token_id, self._tokenizer.token_bytes(entry.token_id), entry.logprob)

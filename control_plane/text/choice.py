"""Turns the tokens of one choice into text that ends at its stop string or stop token.

Tokens pass the detokenizer (whole characters only), then the splitter (which takes the thinking out), then the stop
strings (which hold back text that may become a stop string), then the parser of tool calls. A token's log probability
is returned with the token's last character, and not at all for a token of the thinking or after the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.generation import AnswerEnd, Logprob, PositionLogprobs, TokenDelta
from control_plane.text.stop_strings import StopStrings
from control_plane.text.thinking.planning import Splitter
from control_plane.text.tool import CallDelta
from control_plane.text.tools.parser import CallParser, Parsed
from control_plane.text.vocabulary import Vocabulary


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
    """The chosen token, its likeliest alternatives, and its offset in the choice's text in characters."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    text_offset: int


class TextDelta(NamedTuple):  # as TokenDelta is
    """New text and calls of one choice.

    `token_ids` are all token ids since the last delta, also those whose text is still held back.
    """

    choice_index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprobs, ...] = ()
    finish_reason: AnswerEnd | None = None
    calls: tuple[CallDelta, ...] = ()
    is_cut_in_call: bool = False
    """Whether the answer ended within a tool call."""
    thinking: str = ""
    """New text of the thinking before the answer."""


class ChoiceText:
    """The text of one choice while its tokens arrive."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        context_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        calls: CallParser | None = None,
        shown_ids: Sequence[int] = (),
        splitter: Splitter | None = None,
    ) -> None:
        """`context_ids` are the tokens before the answer if the answer continues their text.

        `splitter` takes the thinking out, `calls` tool calls. `shown_ids` are control tokens that both need by name.
        Stop tokens are never part of the text.
        """
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(context_ids, shown_ids)
        self._calls = calls
        self._splitter = splitter
        self._thinking: list[str] = []
        """Of the current delta."""
        self.num_thinking_tokens = 0
        """Tokens before the answer, marks included."""
        self._stop_strings = StopStrings(stop_strings) if any(stop_strings) else None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_decoded = 0
        self._num_released = 0
        self._waiting: deque[tuple[int, TextLogprobs]] = deque()
        self.finish_reason: AnswerEnd | None = None

    @property
    def ended_by_stop_string(self) -> bool:
        return self._stop_strings is not None and self._stop_strings.matched is not None

    def push(self, delta: TokenDelta) -> TextDelta:
        """Add new tokens of this choice and return the text that is now certain."""
        text = "".join([self._take(token_id, logprobs) for token_id, logprobs in self._text_tokens(delta)])
        if delta.finish_reason is not None:
            text += self._release(self._answer_in(self._detokenizer.flush(), at_end=True))
            if self._stop_strings is not None:
                text += self._count(self._stop_strings.flush())
        self.finish_reason = "stop" if self.ended_by_stop_string else delta.finish_reason
        logprobs, parsed = self._leaving_logprobs(), self._parsed(text)
        if self._calls is not None and self._calls.has_complete_calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        thinking = ""
        if self._thinking:
            thinking, self._thinking = "".join(self._thinking), []
        return TextDelta(
            *(delta.choice_index, parsed.text, delta.token_ids, logprobs, self.finish_reason, parsed.calls),
            is_cut_in_call=self._is_cut_in_call,
            thinking=thinking,
        )

    @property
    def _is_cut_in_call(self) -> bool:
        """Return whether the answer ended within a call: incomplete, or cut off after its opening.

        A model that itself ends the answer after an opening has not been cut off.
        """
        if self._calls is None or self.finish_reason is None:
            return False
        is_cut = self.finish_reason == "length" or self.ended_by_stop_string
        return self._calls.has_incomplete_call or (is_cut and self._calls.is_within_call)

    def _parsed(self, text: str) -> Parsed:
        if self._calls is None:
            return Parsed(text)
        parsed = self._calls.push(text)
        if self.finish_reason is None:
            return parsed
        return Parsed(parsed.text + self._calls.flush().text, parsed.calls)

    def _text_tokens(self, delta: TokenDelta) -> list[tuple[int, PositionLogprobs | None]]:
        """Return tokens with their log probabilities, without a stop token at the end."""
        logprobs = delta.logprobs or (None,) * len(delta.token_ids)
        pairs = list(zip(delta.token_ids, logprobs, strict=True))
        ends_with_stop = delta.finish_reason == "stop" and pairs and pairs[-1][0] in self._stop_token_ids
        return pairs[:-1] if ends_with_stop else pairs

    def _take(self, token_id: int, logprobs: PositionLogprobs | None) -> str:
        start = self._num_decoded
        text = self._detokenizer.push(token_id)
        was_thinking = self._splitter is not None
        if was_thinking:
            text = self._answer_in(text)
        self._num_decoded += len(text)
        if logprobs is not None and (text or not was_thinking):
            self._waiting.append((self._num_decoded, self._with_text(logprobs, start)))
        return self._release(text)

    def _answer_in(self, text: str, *, at_end: bool = False) -> str:
        """Keep the thinking in a text, and return the rest."""
        splitter = self._splitter
        if splitter is None:
            return text
        self.num_thinking_tokens += splitter.is_thinking and not at_end
        thinking, answer = splitter.push(text)
        if at_end:
            held = splitter.flush()
            thinking, answer = thinking + held.thinking, answer + held.answer
        if thinking:
            self._thinking.append(thinking)
        if splitter.is_over:
            self._splitter = None
            self.num_thinking_tokens *= splitter.has_thought
        return answer

    def _release(self, text: str) -> str:
        return self._count(text if self._stop_strings is None else self._stop_strings.push(text))

    def _count(self, released: str) -> str:
        self._num_released += len(released)
        return released

    def _leaving_logprobs(self) -> tuple[TextLogprobs, ...]:
        """Return the entries whose text has been released; at the end, also of tokens that were cut short."""
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
        return TokenText(entry.token_id, self._vocabulary.token_bytes(entry.token_id), entry.logprob)

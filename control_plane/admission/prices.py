"""Predicts how much device time a request of a model takes, from what earlier ones took."""

from __future__ import annotations

from dataclasses import dataclass

_OLD_WEIGHT = 0.95
_ASSUMED_MS_PER_PROMPT_TOKEN = 1.0
_ASSUMED_MS_PER_ANSWER_TOKEN = 10.0
_ASSUMED_ANSWER_TOKENS = 128.0
_ASSUMED_BYTES_PER_TOKEN = 4.0


@dataclass
class Prices:
    """Moving averages of one model; device milliseconds. What is assumed holds until the first measurement."""

    ms_per_prompt_token: float = _ASSUMED_MS_PER_PROMPT_TOKEN
    """Of a token that no cache has."""
    ms_per_answer_token: float = _ASSUMED_MS_PER_ANSWER_TOKEN
    """A step's time by the tokens that it samples."""
    bytes_per_token: float = _ASSUMED_BYTES_PER_TOKEN
    """Of bodies, by the tokens of their prompts."""
    answer_tokens: float = _ASSUMED_ANSWER_TOKENS
    """Length of an answer."""
    _num_routed: int = 0
    _num_prepared: int = 0
    _num_answered: int = 0
    _step_seconds: float = 0.0
    _num_sampled: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether workers have told what answers take."""
        return self._num_sampled > 0

    def routed(self, num_tokens: int, device_ms: float) -> None:
        """A prompt was sent to a worker that is predicted to compute `num_tokens` of it in `device_ms`."""
        if num_tokens > 0:
            self._num_routed += 1
            self.ms_per_prompt_token = _mixed(self.ms_per_prompt_token, device_ms / num_tokens, self._num_routed)

    def stepped(self, step_seconds: float, num_tokens: float) -> None:
        """A worker has reported steps that took so long together, and sampled so many tokens."""
        if step_seconds > 0 and num_tokens > 0:
            self._step_seconds = _OLD_WEIGHT * self._step_seconds + step_seconds
            self._num_sampled = _OLD_WEIGHT * self._num_sampled + num_tokens
            self.ms_per_answer_token = 1000.0 * self._step_seconds / self._num_sampled

    def prepared(self, num_bytes: int, num_tokens: int) -> None:
        """A body of so many bytes has become a prompt of so many tokens."""
        if num_tokens > 0:
            self._num_prepared += 1
            self.bytes_per_token = max(0.1, _mixed(self.bytes_per_token, num_bytes / num_tokens, self._num_prepared))

    def answered(self, num_tokens: int) -> None:
        """An answer of that length has ended."""
        self._num_answered += 1
        self.answer_tokens = _mixed(self.answer_tokens, num_tokens, self._num_answered)

    def request_ms(self, num_prompt_tokens: float, max_tokens: float, num_choices: int = 1) -> float:
        """Predict the device time of a request; `num_prompt_tokens`: those that no cache has."""
        num_answer_tokens = min(max_tokens, self.answer_tokens) * num_choices
        return self.tokens_ms(num_prompt_tokens, num_answer_tokens)

    def tokens_ms(self, num_prompt_tokens: float, num_answer_tokens: float) -> float:
        """Return the device time of tokens that are computed, and of tokens that are sampled."""
        return num_prompt_tokens * self.ms_per_prompt_token + num_answer_tokens * self.ms_per_answer_token


def _mixed(old: float, new: float, number: int) -> float:
    """Mix the measurement of that number, from 1 on, into a mean: the first ones count alike."""
    weight = max(1 - _OLD_WEIGHT, 1 / number)
    return (1 - weight) * old + weight * new

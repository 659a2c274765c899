"""Predicts how much device time a request of a model takes, from what earlier ones took."""

from __future__ import annotations

from dataclasses import dataclass, field

_OLD_WEIGHT = 0.95
_ASSUMED_MS_PER_PROMPT_TOKEN = 1.0
ASSUMED_MS_PER_ANSWER_TOKEN = 10.0
_ASSUMED_ANSWER_TOKENS = 128.0
_ASSUMED_BYTES_PER_TOKEN = 4.0


@dataclass
class _Ratio:
    """Of two sums that forget what is long ago: a prompt of one token does not count like one of a thousand."""

    numerator: float = 0.0
    denominator: float = 0.0

    def added(self, numerator: float, denominator: float) -> float:
        """Add to both sums, and return their ratio. `denominator` is above 0."""
        self.numerator = _OLD_WEIGHT * self.numerator + numerator
        self.denominator = _OLD_WEIGHT * self.denominator + denominator
        return self.numerator / self.denominator


@dataclass(frozen=True)
class PredictedWork:
    """Device time of a request, in tokens of an answer."""

    prompt: float = 0.0
    answer: float = 0.0
    """Of each choice."""


@dataclass
class Prices:
    """Moving averages of one model; device milliseconds. What is assumed holds until the first measurement."""

    ms_per_prompt_token: float = _ASSUMED_MS_PER_PROMPT_TOKEN
    """Of a token that no cache has."""
    ms_per_answer_token: float = ASSUMED_MS_PER_ANSWER_TOKEN
    """A step's time by the tokens that it samples."""
    bytes_per_token: float = _ASSUMED_BYTES_PER_TOKEN
    """Of bodies, by the tokens of their prompts."""
    answer_tokens: float = _ASSUMED_ANSWER_TOKENS
    """Length of an answer."""
    _num_prepared: int = 0
    _num_answered: int = 0
    _routed: _Ratio = field(default_factory=_Ratio)
    _stepped: _Ratio = field(default_factory=_Ratio)

    @property
    def is_measured(self) -> bool:
        """Whether workers have told what answers take."""
        return self._stepped.denominator > 0

    def routed(self, num_tokens: int, device_ms: float) -> None:
        """A prompt was sent to a worker that is predicted to compute `num_tokens` of it in `device_ms`."""
        if num_tokens > 0:
            self.ms_per_prompt_token = self._routed.added(device_ms, num_tokens)

    def stepped(self, step_seconds: float, num_tokens: float) -> None:
        """A worker has reported steps that took so long together, and sampled so many tokens."""
        if step_seconds > 0 and num_tokens > 0:
            self.ms_per_answer_token = self._stepped.added(1000.0 * step_seconds, num_tokens)

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

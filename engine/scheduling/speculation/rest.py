"""When is it not even worth looking for a guess?

Looking takes some 50 us: nothing where a step takes 10 ms, some percent where it takes one. So what looks bring, right
guesses less what trying costs, is set against what they take, both measured, in tokens; a request for which it is less
rests: for 8 tokens, 16, 32, then 64 at a time, with a few looks between them, in which one guess is tried though it may
not pay: else nobody would notice that its text has become one that repeats itself. A new request begins as others have
ended: with one look, and a longer pause, where theirs brought too little.
"""

from __future__ import annotations

_LEAST_GAIN = 0.04  # tokens per look
_WORST_GAIN = -1.0  # whatever it was: what comes after counts soon
_ALL_OF_IT = 2.0  # times what finding a guess takes: ranking it, noting its fate, caches with less of the model
_NEWEST = 1 / 48
_NEWEST_OF_ALL = 1 / 64
_MOST_AT_ONCE = 4  # times as long as usual: another process had the core
_NUM_LOOKS = 2
_FIRST_PAUSE_TOKENS = 8
_LONGEST_PAUSE_TOKENS = 64


class Looks:
    """What looks of all requests bring and take, the newest counting most."""

    def __init__(self) -> None:
        self.mean_gain = 0.25
        self.least_gain = _LEAST_GAIN
        self._seconds = 0.0
        self._row_cost = 0.0

    def took(self, seconds: float, tokens_per_second: float, row_seconds: float) -> None:
        """Finding a guess took so long, answers going on so fast without; each that is tried adds so much to a step."""
        if not self._seconds:
            self._seconds = seconds
        self._seconds += _NEWEST * (min(seconds, _MOST_AT_ONCE * self._seconds) - self._seconds)
        self.least_gain = max(_LEAST_GAIN, _ALL_OF_IT * self._seconds * tokens_per_second)
        self._row_cost = row_seconds * tokens_per_second

    def gain(self, num_right: int, num_tried: int) -> float:
        """Return what a look brought, in tokens, so many of its guesses having been tried, and right."""
        gain = max(_WORST_GAIN, num_right - self._row_cost * num_tried)
        self.mean_gain += _NEWEST_OF_ALL * (gain - self.mean_gain)
        return gain


class Rest:
    """One request's looks and pauses."""

    def __init__(self, of_all: Looks) -> None:
        self._of_all = of_all
        self._mean_gain = of_all.mean_gain
        is_hopeful = self._mean_gain >= of_all.least_gain
        self._num_looks_left = _NUM_LOOKS if is_hopeful else 1
        self._pause_tokens = 0 if is_hopeful else _FIRST_PAUSE_TOKENS
        self._is_over_at = 0

    def is_over(self, num_tokens: int) -> bool:
        """Whether to look, the request having so many tokens."""
        return num_tokens >= self._is_over_at

    @property
    def num_probes(self) -> int:
        """How many guesses to try though they do not pay: one, at the first look after a pause."""
        return 1 if self._pause_tokens and self._num_looks_left == _NUM_LOOKS else 0

    def looked(self, num_tokens: int, num_right: int, num_tried: int = 0) -> None:
        """A look's guesses were tried, and right, so often; the request has about `num_tokens` tokens now."""
        self._mean_gain += _NEWEST * (self._of_all.gain(num_right, num_tried) - self._mean_gain)
        self._num_looks_left -= 1
        if num_right:
            self._pause_tokens = 0
        elif self._mean_gain < self._of_all.least_gain and self._num_looks_left <= 0:
            self._pause_tokens = min(max(_FIRST_PAUSE_TOKENS, 2 * self._pause_tokens), _LONGEST_PAUSE_TOKENS)
            self._is_over_at = num_tokens + self._pause_tokens
            self._num_looks_left = _NUM_LOOKS

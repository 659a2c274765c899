"""When is it not even worth looking for a guess?

Where steps take a millisecond, looking is some percent of one. So a request for which it brings nothing rests: for 8
tokens, 16, 32, then 64 at a time, with a few looks between them, in which one guess is tried though it may not pay:
else nobody would notice that its text has become one that repeats itself. A new request begins as others have ended:
with one look where theirs brought nothing.
"""

from __future__ import annotations

_LEAST_GAIN = 0.08  # right guesses per look
_NEWEST = 1 / 16
_NEWEST_OF_ALL = 1 / 64
_NUM_LOOKS = 2
_FIRST_PAUSE_TOKENS = 8
_LONGEST_PAUSE_TOKENS = 64


class Gain:
    """Right guesses per look, of all requests, the newest counting most."""

    def __init__(self) -> None:
        self.mean = 1.0

    def observe(self, num_right: int) -> None:
        self.mean += _NEWEST_OF_ALL * (num_right - self.mean)


class Rest:
    """One request's looks and pauses."""

    def __init__(self, of_all: Gain) -> None:
        self._of_all = of_all
        self._gain = of_all.mean
        is_hopeful = self._gain >= _LEAST_GAIN
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

    def looked(self, num_tokens: int, num_right: int) -> None:
        """A look brought so many right guesses; the request has about `num_tokens` tokens now."""
        self._of_all.observe(num_right)
        self._gain += _NEWEST * (num_right - self._gain)
        self._num_looks_left -= 1
        if num_right:
            self._pause_tokens = 0
        elif self._gain < _LEAST_GAIN and self._num_looks_left <= 0:
            self._pause_tokens = min(max(_FIRST_PAUSE_TOKENS, 2 * self._pause_tokens), _LONGEST_PAUSE_TOKENS)
            self._is_over_at = num_tokens + self._pause_tokens
            self._num_looks_left = _NUM_LOOKS

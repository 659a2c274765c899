"""How long does a draft model take?"""

from __future__ import annotations

_NEWEST = 1 / 8
_NUM_FIRST = 4  # the least of so many counts: what is done for the first time is slow
_MOST_AT_ONCE = 4  # times as much as before: another process had the core
_USUAL_MISSING = 2  # tokens per request and call: the last one guessed, if it was right, and the one drawn behind it
_FEW_TOKENS = 8
_FIRST_TOKEN_SHARE = 1 / 4  # of a round, that a token of many is thought to take before that was measured


class ProposalCost:
    """Seconds of a round, by how many requests are asked about, and of each token to catch up with."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Mean] = {}  # by the number of binary digits of the number of requests
        self._token = _Mean()
        self._is_rough = False
        self.num_calls = 0

    @property
    def is_known(self) -> bool:
        return bool(self._rounds)

    def round_seconds(self, num_requests: int) -> float:
        """Return what a round should take; of so many requests none need have been measured, but of some."""
        size = num_requests.bit_length()
        nearest = min(self._rounds, key=lambda other: (abs(other - size), other))
        return self._rounds[nearest].value

    def catch_up_seconds(self, num_tokens: int) -> float:
        """Return what computing so many known tokens should take; 0 while nothing was measured."""
        if self._token.num:
            return self._token.value * num_tokens
        return _FIRST_TOKEN_SHARE * self.round_seconds(1) * num_tokens if self._rounds else 0.0

    def seconds(self, num_requests: int, num_rounds: int, num_missing: int) -> float:
        """Return what it should take to ask."""
        extra = max(0, num_missing - _USUAL_MISSING * num_requests)
        return num_rounds * self.round_seconds(num_requests) + self.catch_up_seconds(extra)

    def observe(self, num_requests: int, num_rounds: int, num_missing: int, seconds: float) -> None:
        """Asking about so many requests took `seconds`: rounds, the first one with `num_missing` tokens."""
        self.num_calls += 1
        extra = num_missing - _USUAL_MISSING * num_requests
        if num_rounds and extra <= _FEW_TOKENS:
            if self._is_rough:
                self._rounds.clear()
                self._is_rough = False
            self._rounds.setdefault(num_requests.bit_length(), _Mean()).observe(seconds / num_rounds)
        elif num_rounds and (self._is_rough or not self.is_known):  # a guess, until a round without many comes
            share = seconds / (num_rounds + _FIRST_TOKEN_SHARE * extra)
            self._rounds.setdefault(num_requests.bit_length(), _Mean()).observe(share)
            self._is_rough = True
        elif extra > _FEW_TOKENS:
            of_rounds = num_rounds * self.round_seconds(num_requests) if num_rounds else 0.0
            self._token.observe(max(0.0, seconds - of_rounds) / extra)


class _Mean:
    """The newest count most."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num = 0

    def observe(self, value: float) -> None:
        if not self.num:
            self.value = value
        elif self.num < _NUM_FIRST:
            self.value = min(self.value, value)
        else:
            self.value += _NEWEST * (min(value, _MOST_AT_ONCE * self.value) - self.value)
        self.num += 1

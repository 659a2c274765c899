"""How likely is a guess to be right?

Its chance is the share of such guesses that were right lately, in the whole engine; guesses are alike if as many tokens
before them agreed with where they come from, and if what followed there was as firm. Times what this request's guesses
turned out to be worth beside that.
"""

from __future__ import annotations

from tandem_engine.scheduling.speculation.drafters import Guess
from tandem_engine.scheduling.speculation.ngrams import MOST_AGREED

_CLASS_OF = (0, 0, 1, 2, 3, 3, 4, 4, 4, *[5] * (MOST_AGREED - 9), 6)  # by tokens that agreed: 1 2 3 4-5 6-8 9-15 16
_FIRST_RATES = (
    (0.2, 0.25, 0.3, 0.35, 0.45, 0.5, 0.55),  # CHANGED
    (0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9),  # UNSEEN
    (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95),  # FIRM
)
_FIRST_WEIGHT = 4  # guesses that the first rates count for
_NEWEST = 1 / 32
_REQUEST_FADE = 15 / 16
_REQUEST_START = 2.0  # guesses that a new request is thought to have had, and as right as others'
MOST_CHANCE = 0.98


class Rates:
    """Shares of one drafter's guesses that were right, the newest counting most."""

    def __init__(self) -> None:
        self._rates = [list(rates) for rates in _FIRST_RATES]
        self._nums = [[_FIRST_WEIGHT] * len(rates) for rates in _FIRST_RATES]

    def of(self, num_agreed: int, firmness: int) -> float:
        return self._rates[firmness][_CLASS_OF[min(num_agreed, MOST_AGREED)]]

    def observe(self, num_agreed: int, firmness: int, is_right: bool) -> None:
        number, rates, nums = _CLASS_OF[min(num_agreed, MOST_AGREED)], self._rates[firmness], self._nums[firmness]
        nums[number] += 1
        rates[number] += max(_NEWEST, 1 / nums[number]) * (is_right - rates[number])


class Acceptance:
    """One request's guesses of one drafter."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._num_right = self._num_expected = _REQUEST_START

    def chances(self, guess: Guess, least: float) -> list[float]:
        """Return for each token how likely it is to be right with all before it, up to the first below `least`."""
        factor = self._num_right / self._num_expected
        chances, chance = [], 1.0
        for num_agreed, firmness in enumerate(guess.firmness, guess.num_agreed):
            chance *= min(MOST_CHANCE, factor * self._rates.of(num_agreed, firmness))
            chances.append(chance)
            if chance < least:
                break
        return chances

    def observe(self, guess: Guess, num_tokens: int, num_right: int) -> None:
        """Of `num_tokens` that were tried the first `num_right` were; those behind the first wrong one say nothing."""
        for index in range(min(num_right + 1, num_tokens)):
            num_agreed, firmness, is_right = guess.num_agreed + index, guess.firmness[index], index < num_right
            self._num_right += (1 - _REQUEST_FADE) * (_REQUEST_START - self._num_right) + is_right
            expected = self._rates.of(num_agreed, firmness)
            self._num_expected += (1 - _REQUEST_FADE) * (_REQUEST_START - self._num_expected) + expected
            self._rates.observe(num_agreed, firmness, is_right)

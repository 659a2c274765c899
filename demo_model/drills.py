"""Makes drills: random tokens, then the same tokens again. They teach a small model to copy much sooner than text does.

Copying needs two attention heads that work together (Olsson et al. 2022, https://arxiv.org/abs/2209.11895, "induction
heads"). Few tokens of chats reward these heads: with drills in a tenth of the documents they had not formed after 5 M
tokens. So half of the first steps' documents are drills (`drill_share`). Words have spaces between them, as in text,
where the token before the last one decides the next.
"""

from collections.abc import Callable
from random import Random

from demo_model.encoded import SPECIAL_TOKEN_IDS, Encoded

_FIRST_ORDINARY_ID = len(SPECIAL_TOKEN_IDS)
_NUM_HEAVY_STEPS = 2200


def drill_share(step: int) -> float:
    """Return the share of drills among the documents of a training step."""
    return 0.5 if step < _NUM_HEAVY_STEPS else 0.1


def _random_tokens(random: Random, vocabulary_size: int, fewest: int, most: int) -> list[int]:
    return [random.randrange(_FIRST_ORDINARY_ID, vocabulary_size) for _ in range(random.randint(fewest, most))]


def _repeat_whole(tokens: list[int], separator: list[int], num_repeats: int = 1) -> Encoded:
    """a b c | a b c | a b c: all copies after the first are trained, from their first token on."""
    given = tokens + separator
    repeated = [token for _ in range(num_repeats) for token in given][: -len(separator) or None]
    return Encoded(given + repeated, [False] * len(given) + [True] * len(repeated))


def _repeat_span(random: Random, tokens: list[int], separator: list[int]) -> Encoded:
    """a b c d e | c d: an earlier token decides the next, so the first token of the span cannot be trained."""
    start = random.randrange(len(tokens) - 2)
    span = tokens[start : start + random.randint(2, 12)]
    given = tokens + separator + span[:1]
    return Encoded(given + span[1:], [False] * len(given) + [True] * (len(span) - 1))


def _spaced(tokens: list[int], space: list[int]) -> list[int]:
    return [each for token in tokens for each in (*space, token)][len(space) :]


def drill(random: Random, vocabulary_size: int, encode: Callable[[str], list[int]]) -> Encoded:
    """Make one drill of any ordinary tokens, rare ones as often as common ones."""
    newline = encode("\n")
    if random.random() < 0.25:
        return _repeat_span(random, _random_tokens(random, vocabulary_size, 4, 60), newline)
    num_repeats = random.choice((1, 1, 2, 3))
    tokens = _random_tokens(random, vocabulary_size, 2, 40 // num_repeats)
    if random.random() < 0.5:
        tokens = _spaced(tokens[:20], encode(" "))
    return _repeat_whole(tokens, newline, num_repeats)

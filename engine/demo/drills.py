"""Drills: random tokens, then the same again. A small model learns to copy from these long before it would from text.

Copying needs two attention heads that work together (Olsson et al. 2022, https://arxiv.org/abs/2209.11895, "induction
heads"). In chats few tokens reward them: without drills they formed only after 4 M tokens.
"""

from random import Random

from engine.demo.encoded import SPECIAL_TOKEN_IDS, Encoded

_FIRST_ORDINARY_ID = len(SPECIAL_TOKEN_IDS)


def _random_tokens(random: Random, vocabulary_size: int, fewest: int, most: int) -> list[int]:
    return [random.randrange(_FIRST_ORDINARY_ID, vocabulary_size) for _ in range(random.randint(fewest, most))]


def _repeat_whole(tokens: list[int], separator: list[int]) -> Encoded:
    """a b c | a b c: all of the second copy is trained, from its first token on."""
    given = tokens + separator
    return Encoded(given + tokens, [False] * len(given) + [True] * len(tokens))


def _repeat_span(random: Random, tokens: list[int], separator: list[int]) -> Encoded:
    """a b c d e | c d: a token already seen says where to go on, so the first of the span cannot be trained."""
    start = random.randrange(len(tokens) - 2)
    span = tokens[start : start + random.randint(2, 12)]
    given = tokens + separator + span[:1]
    return Encoded(given + span[1:], [False] * len(given) + [True] * (len(span) - 1))


def drill(random: Random, vocabulary_size: int, separator: list[int]) -> Encoded:
    """Make one drill of any ordinary tokens, rare ones as often as common ones."""
    if random.random() < 0.5:
        return _repeat_whole(_random_tokens(random, vocabulary_size, 2, 40), separator)
    return _repeat_span(random, _random_tokens(random, vocabulary_size, 4, 60), separator)

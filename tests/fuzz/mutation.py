"""Changes inputs at random, the same way for the same seed: the short form of fuzzing, without coverage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_INTERESTING = (0, 1, 7, 16, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_MAX_BYTES = 1 << 16


def mutations(seeds: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield changed inputs for ever: one to four changes, each of a seed or of an input before."""
    chance = random.Random(seed)
    pool = list(seeds)
    while True:
        data = bytearray(chance.choice(pool))
        for _ in range(chance.randint(1, 4)):
            _change(data, pool, chance)
        changed = bytes(data[:_MAX_BYTES])
        pool[chance.randrange(len(pool))] = chance.choice((changed, chance.choice(list(seeds))))
        yield changed


def _change(data: bytearray, pool: Sequence[bytes], chance: random.Random) -> None:
    place = chance.randint(0, len(data))
    match chance.randrange(7):
        case 0 if data:  # a bit
            data[place % len(data)] ^= 1 << chance.randrange(8)
        case 1 if data:  # a byte
            data[place % len(data)] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        case 2:  # a number, over or between the bytes
            number = chance.choice(_INTERESTING).to_bytes(8, "little")[: chance.choice((1, 2, 4, 8))]
            data[place : place + chance.choice((0, len(number)))] = number
        case 3:  # less
            del data[place : place + chance.choice((1, 2, 8, 64, len(data)))]
        case 4:  # a part twice
            data[place:place] = data[place : place + chance.choice((1, 4, 32, 512))]
        case 5:  # a part of another input
            other = chance.choice(pool)
            start = chance.randint(0, len(other))
            data[place:place] = other[start : start + chance.choice((4, 32, 512))]
        case _:  # random bytes
            data[place:place] = chance.randbytes(chance.choice((1, 4, 16)))

"""The table of known blocks rules out only blocks that the store does not have."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tandem_runtime.kv.known_blocks import KnownBlocks

LAYOUT = b"l" * 16


@pytest.fixture
def known() -> Iterator[KnownBlocks]:
    table = KnownBlocks.create()
    yield table
    table.close()


def test_a_reader_sees_what_is_counted_in_and_out(known: KnownBlocks) -> None:
    region = known.region
    seen = KnownBlocks.map_read_only(region.fd, region.num_slots, region.generations_offset)
    assert not seen.may_have(LAYOUT, b"a" * 16)
    known.memory.add(LAYOUT, b"a" * 16)
    known.disk.add(LAYOUT, b"a" * 16)
    assert seen.may_have(LAYOUT, b"a" * 16) and not seen.may_have(LAYOUT, b"b" * 16)
    assert not seen.may_have(b"m" * 16, b"a" * 16), "of another layout"
    known.memory.remove(LAYOUT, b"a" * 16)
    assert seen.may_have(LAYOUT, b"a" * 16), "it is on disk"
    known.disk.remove(LAYOUT, b"a" * 16)
    assert not seen.may_have(LAYOUT, b"a" * 16)
    with pytest.raises(TypeError):
        seen.memory.add(LAYOUT, b"a" * 16)
    seen.close()


def test_nothing_that_is_there_is_ever_denied(known: KnownBlocks) -> None:
    """Also where hundreds of blocks share a bucket, which is full then."""
    chance = random.Random(7)
    hashes = [chance.randbytes(16) for _ in range(20)] + [os.urandom(16) for _ in range(20)]
    there: Counter[bytes] = Counter()
    for _ in range(20_000):
        block_hash = chance.choice(hashes)
        if there[block_hash] and chance.random() < 0.45:
            there[block_hash] -= 1
            known.memory.remove(LAYOUT, block_hash)
        else:
            there[block_hash] += 1
            known.memory.add(LAYOUT, block_hash)
        assert all(known.may_have(LAYOUT, each) for each, count in there.items() if count)
    assert not known.may_have(LAYOUT, b"never was here!!")

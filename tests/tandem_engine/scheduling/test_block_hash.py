"""Tests that a block's hash identifies exactly its content."""

from __future__ import annotations

from tandem_engine.scheduling.block_hash import hash_blocks, hash_root, next_block_hash

ROOT = hash_root(b"fingerprint", 4, "", b"salt")


def test_a_hash_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert ROOT.hex() == "6f877e189680370db0135be8cf45e9f4"
    assert next_block_hash(ROOT, [1, 2, 3, 128_000]).hex() == "fb00e3b9a782ff397c46f3ae6cad5bd2"


def test_every_field_of_the_root_counts_and_none_runs_into_the_next() -> None:
    roots = [
        ROOT,
        hash_root(b"other", 4, "", b"salt"),
        hash_root(b"fingerprint", 8, "", b"salt"),
        hash_root(b"fingerprint", 4, "lora", b"salt"),
        hash_root(b"fingerprint", 4, "", b"pepper"),
        hash_root(b"fingerprint", 4, "salt", b""),
        hash_root(b"fingerprint", 4, "sa", b"lt"),
    ]
    assert len(set(roots)) == 7
    assert {len(root) for root in roots} == {16}


def test_only_full_blocks_have_hashes_and_they_form_a_chain() -> None:
    first = next_block_hash(ROOT, [1, 2, 3, 4])
    second = next_block_hash(first, [5, 6, 7, 8])
    assert hash_blocks(ROOT, [1, 2, 3], 4) == []
    assert hash_blocks(ROOT, [1, 2, 3, 4], 4) == [first]
    assert hash_blocks(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [first, second]


def test_equal_tokens_after_different_prefixes_have_different_hashes() -> None:
    assert hash_blocks(ROOT, [1, 1, 7, 7], 2)[1] != hash_blocks(ROOT, [2, 2, 7, 7], 2)[1]

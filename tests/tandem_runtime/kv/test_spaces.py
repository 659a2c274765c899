"""Spaces: which workers share blocks, and the keys that keep the blocks of others out of reach."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.spaces import fold, layout_family, model_identity, space_of, worker_keys


def _card(
    *,
    numerics_class: str = "cpp",
    dtype: str = "float32",
    block: int = 16,
    heads: int = 2,
    exactness: str = "",
    order: str = "layer,kv,head,token,dim",
) -> pb.ModelCard:
    group = pb.KvGroup(
        kind=pb.KV_GROUP_KIND_FULL, layers=[0, 1], tokens_per_block=block, num_kv_heads=heads, dtype=dtype, order=order
    )
    return pb.ModelCard(
        fingerprint=pb.Fingerprint(weights_digest="w", kv_dtype=dtype, numerics_class=numerics_class),
        layout=pb.KvLayout(version=1, groups=[group]),
        exactness=exactness,
    )


@pytest.mark.parametrize(
    "change", [{"numerics_class": "torch"}, {"dtype": "bfloat16"}, {"block": 32}, {"order": "layer,token,head,kv,dim"}]
)
def test_a_class_shares_nothing_with_another_class_or_layout_and_a_family_shares_both(
    change: dict[str, object],
) -> None:
    assert space_of(_card()) == space_of(_card(exactness="class"))
    assert space_of(_card(**change)) != space_of(_card())  # type: ignore[arg-type]
    both = [space_of(_card(exactness="layout", **options)) for options in ({}, change)]  # type: ignore[arg-type]
    assert both[0] == both[1] != space_of(_card())


def test_blocks_with_other_heads_belong_to_another_family() -> None:
    assert layout_family(_card(heads=4).layout) != layout_family(_card().layout)
    assert space_of(_card(heads=4, exactness="layout")) != space_of(_card(exactness="layout"))


def test_blocks_in_an_order_that_one_engine_alone_can_read_belong_to_a_family_of_their_own() -> None:
    named = _card(exactness="layout", order="layer,head,(key:dim,token|value:token,dim)")
    packed = [_card(exactness="layout", order=order) for order in ("vllm-LBHNC-amx", "vllm-LBHNC-rvv")]
    assert space_of(named) == space_of(_card(exactness="layout"))
    assert len({space_of(card) for card in (named, *packed)}) == 3
    assert space_of(packed[0]) == space_of(_card(exactness="layout", order="vllm-LBHNC-amx", numerics_class="torch"))


def test_the_identity_is_that_of_weights_quantization_and_tokenizer() -> None:
    base = pb.Fingerprint(weights_digest="a", quantization="", tokenizer_digest="t", numerics_class="x", kv_dtype="f")
    same = pb.Fingerprint(weights_digest="a", quantization="", tokenizer_digest="t", numerics_class="y", kv_dtype="b")
    assert model_identity(base) == model_identity(same) and len(model_identity(base)) == 16
    others = [{"weights_digest": "b"}, {"quantization": "int4"}, {"tokenizer_digest": "u"}]
    for change in others:
        other = pb.Fingerprint()
        other.CopyFrom(base)
        other.MergeFrom(pb.Fingerprint(**change))  # type: ignore[arg-type]
        assert model_identity(other) != model_identity(base)
    moved = pb.Fingerprint(weights_digest="at", tokenizer_digest="")
    assert model_identity(moved) != model_identity(pb.Fingerprint(weights_digest="a", tokenizer_digest="t"))


@given(st.binary(max_size=40).map(lambda seed: (seed * 16)[: len(seed) * 16]), st.binary(min_size=16, max_size=16))
def test_folding_twice_gives_the_hashes_again(hashes: bytes, space: bytes) -> None:
    keys = fold(hashes, space)
    assert len(keys) == len(hashes) and fold(keys, space) == hashes
    assert keys == bytes(a ^ b for a, b in zip(hashes, space * (len(hashes) // 16), strict=True))


@pytest.mark.parametrize(("block", "ends"), [(8, [1, 2, 3, 4, 5]), (16, [2, 4]), (32, [4]), (64, [])])
def test_a_worker_takes_every_nth_hash(block: int, ends: list[int]) -> None:
    hashes, space = os.urandom(5 * 16), os.urandom(16)
    keys = worker_keys(hashes, 8, block, space)
    assert keys == fold(b"".join(hashes[(end - 1) * 16 : end * 16] for end in ends), space)


def test_a_block_that_is_no_multiple_of_the_grain_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="24 tokens is no multiple of the grain, 16"):
        worker_keys(b"", 16, 24, b"")

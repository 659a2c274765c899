from __future__ import annotations

import pytest

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import FingerprintMismatch, InvalidRequest, Unauthenticated, Unsupported
from tandem_runtime.kv.layout import check_layout, check_memory_kind, check_supported, layout_digest
from tandem_runtime.kv.mac import sign_handle, verify_handle
from tandem_runtime.kv.slabs import first_missing_block, trim_slab
from tandem_runtime.kv.tables import prompt_bytes

KEY = b"secret"


def layout() -> pb.KvLayout:
    group = pb.KvGroup(
        kind=pb.KV_GROUP_KIND_FULL, layers=[0, 1], tokens_per_block=16, dtype="bfloat16", bytes_per_block=64
    )
    return pb.KvLayout(version=1, groups=[group], shard=pb.KvShard(tp_size=1, num_heads=2))


def mixed_layout() -> pb.KvLayout:
    """Return layer 1 of `layout` with a window, in a group of its own."""
    mixed = layout()
    mixed.groups.add().CopyFrom(mixed.groups[0])
    mixed.groups[0].layers[:] = [0]
    mixed.groups[1].layers[:] = [1]
    mixed.groups[1].kind, mixed.groups[1].window = pb.KV_GROUP_KIND_WINDOW, 20
    return mixed


def test_equal_layouts_have_equal_digests_and_others_do_not() -> None:
    other = layout()
    other.groups[0].order = "kv"
    assert layout_digest(layout()) == layout_digest(layout())
    assert len(layout_digest(layout())) == 16
    assert layout_digest(layout()) != layout_digest(other)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("layout.version", lambda other: setattr(other, "version", 2)),
        ("layout.groups[0].dtype", lambda other: setattr(other.groups[0], "dtype", "float32")),
        ("layout.groups[0].layers", lambda other: other.groups[0].layers.append(2)),
        ("layout.groups[0].bytes_per_block", lambda other: setattr(other.groups[0], "bytes_per_block", 1)),
        ("layout.shard.num_heads", lambda other: setattr(other.shard, "num_heads", 4)),
        ("layout.groups", lambda other: other.groups.add()),
    ],
)
def test_a_mismatch_names_the_field(field: str, change: object) -> None:
    other = layout()
    change(other)  # type: ignore[operator]
    with pytest.raises(FingerprintMismatch) as refused:
        check_layout(layout(), other)
    assert refused.value.field == field
    assert f"differ in {field}:" in str(refused.value)
    check_layout(layout(), layout())


def test_what_is_not_built_is_refused_by_name() -> None:
    check_supported(layout())
    check_supported(mixed_layout())
    latent, boundless, sharded = layout(), mixed_layout(), layout()
    latent.groups[0].kind = pb.KV_GROUP_KIND_LATENT
    boundless.groups[1].window = 0
    sharded.shard.tp_size = 2
    with pytest.raises(Unsupported, match="KV_GROUP_KIND_LATENT"):
        check_supported(latent)
    with pytest.raises(InvalidRequest, match="KV_GROUP_KIND_WINDOW with a window of 0"):
        check_supported(boundless)
    with pytest.raises(Unsupported, match="tp_size 2"):
        check_supported(sharded)
    with pytest.raises(InvalidRequest, match="no groups"):
        check_supported(pb.KvLayout())
    with pytest.raises(Unsupported, match="MEMORY_KIND_DISK"):
        check_memory_kind(pb.Extent(kind=pb.MEMORY_KIND_DISK))


def test_a_signed_handle_verifies_and_any_change_shows() -> None:
    handle = pb.KvHandle(handle_id=b"x" * 16, request_id="r", num_tokens=3, model=pb.ModelRef(model_id="m"))
    signed = sign_handle(handle, KEY)
    assert (handle.mac, len(signed.mac)) == (b"", 16)
    verify_handle(signed, KEY)
    verify_handle(sign_handle(signed, KEY), KEY)
    with pytest.raises(Unauthenticated):
        verify_handle(signed, b"another key")
    with pytest.raises(Unauthenticated):
        verify_handle(handle, KEY)
    signed.num_readers = 2
    with pytest.raises(Unauthenticated, match="request 'r'"):
        verify_handle(signed, KEY)


def test_a_slab_is_trimmed_to_what_is_needed() -> None:
    slab = kv.Slab(
        index=1, first_block=4, num_blocks=3, extents=[pb.Extent(slot=n) for n in range(3)], checksums=[7, 8, 9]
    )
    assert trim_slab(slab, 0) is slab
    assert trim_slab(slab, 4) is slab
    trimmed = trim_slab(slab, 6)
    assert trimmed is not None
    assert (trimmed.index, trimmed.first_block, trimmed.num_blocks) == (1, 6, 1)
    assert ([extent.slot for extent in trimmed.extents], list(trimmed.checksums)) == ([2], [9])
    assert trim_slab(slab, 7) is None
    assert slab.num_blocks == 3


def test_a_block_is_missing_until_all_its_layers_are_in_some_slab() -> None:
    def slab(first_block: int, num_blocks: int, num_layers: int) -> kv.Slab:
        return kv.Slab(first_block=first_block, num_blocks=num_blocks, num_layers=num_layers)

    assert first_missing_block([], layout(), 48, 0, 0) is None
    assert first_missing_block([], layout(), 48, 0, 3) == 0
    assert first_missing_block([slab(0, 2, 2)], layout(), 48, 0, 3) == 2
    assert first_missing_block([slab(0, 3, 2)], layout(), 48, 0, 3) is None
    assert first_missing_block([slab(1, 2, 2)], layout(), 48, 1, 3) is None
    assert first_missing_block([slab(2, 1, 2), slab(0, 1, 2)], layout(), 48, 0, 3) == 1
    assert first_missing_block([slab(2, 1, 2), slab(0, 2, 2)], layout(), 48, 0, 3) is None
    assert first_missing_block([slab(0, 3, 2), slab(0, 3, 1)], layout(), 48, 0, 4) == 3
    assert first_missing_block([slab(0, 3, 1)], layout(), 48, 0, 3) == 0
    assert first_missing_block([slab(0, 3, 1), slab(0, 3, 1)], layout(), 48, 0, 3) is None


def test_of_a_group_with_a_window_only_the_blocks_that_the_next_token_sees_are_missing() -> None:
    def slab(group: int, first_block: int, num_blocks: int) -> kv.Slab:
        return kv.Slab(group=group, first_block=first_block, num_blocks=num_blocks, num_layers=1)

    # The token behind 66 others sees those from 47 on: of five blocks the last three.
    full = slab(0, 0, 5)
    assert first_missing_block([full], mixed_layout(), 66, 0, 5) == 2
    assert first_missing_block([full, slab(1, 3, 2)], mixed_layout(), 66, 0, 5) == 2
    assert first_missing_block([full, slab(1, 2, 3)], mixed_layout(), 66, 0, 5) is None
    assert first_missing_block([slab(0, 1, 4), slab(1, 2, 3)], mixed_layout(), 66, 0, 5) == 0
    assert first_missing_block([slab(0, 4, 1), slab(1, 4, 1)], mixed_layout(), 66, 4, 5) is None
    assert prompt_bytes(mixed_layout(), 66) == (5 + 3) * 64

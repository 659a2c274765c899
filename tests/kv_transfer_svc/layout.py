"""The KV layout and the handle key of the tests."""

from __future__ import annotations

from typing import Any

from tandem.v1 import types_pb2 as pb

KEY = b"a key that control plane and KV services share"
BLOCK_BYTES = 8192
BLOCK_TOKENS = 16


def a_layout(**changes: Any) -> pb.KvLayout:
    group = pb.KvGroup(
        kind=pb.KV_GROUP_KIND_FULL,
        layers=[0, 1],
        tokens_per_block=BLOCK_TOKENS,
        num_kv_heads=2,
        k_head_size=32,
        v_head_size=32,
        dtype="float32",
        order="layer,kv,head,token,dim",
        bytes_per_block=BLOCK_BYTES,
    )
    for name, value in changes.items():
        setattr(group, name, value)
    return pb.KvLayout(version=1, groups=[group], shard=pb.KvShard(tp_size=1))

"""The KV layout and the keys of the tests."""

from __future__ import annotations

from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.signatures import HandleSigner

SIGNER = HandleSigner(bytes(range(32)))
KEYS = KvKeys((SIGNER.public_key,), b"a key that only KV services have")
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

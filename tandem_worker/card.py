"""Which model does this worker serve, and how does its KV cache lie in memory?"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_runtime.errors import FingerprintMismatch, ModelNotFound


def model_card(ready: messages.Ready) -> pb.ModelCard:
    """Return what clients and other workers need to know of a loaded model; reads the assets' digests."""
    model, layout = ready.model, kv_layout(ready.layout)
    return pb.ModelCard(
        model_id=model.model_id,
        fingerprint=fingerprint(model),
        layout=layout,
        block_size=ready.layout.tokens_per_block,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        generation_defaults=_generation_defaults(model.generation_defaults),
        chat_template=model.chat_template,
        assets=[asset(name, Path(path)) for name, path in sorted(model.asset_paths.items())],
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        dtype=model.dtype,
        created_unix_seconds=int(time.time()),
        task="text-generation",
    )


def kv_layout(layout: messages.LayoutInfo) -> pb.KvLayout:
    """Return the pool's layout, not sharded: one FULL group over all layers, or one and WINDOW groups beside it."""
    parts = [(part.layers, part.window) for part in layout.groups] or [(list(range(layout.num_layers)), None)]
    groups = [
        pb.KvGroup(
            kind=pb.KV_GROUP_KIND_WINDOW if window else pb.KV_GROUP_KIND_FULL,
            layers=layers,
            window=window or 0,
            tokens_per_block=layout.tokens_per_block,
            num_kv_heads=layout.num_kv_heads,
            k_head_size=layout.k_head_size,
            v_head_size=layout.v_head_size,
            dtype=layout.dtype,
            order=layout.order,
            bytes_per_block=layout.bytes_per_block,
        )
        for layers, window in parts
    ]
    return pb.KvLayout(version=1, groups=groups, shard=pb.KvShard(tp_size=1, num_heads=layout.num_kv_heads))


def fingerprint(model: messages.ModelInfo) -> pb.Fingerprint:
    """Return what must agree between workers; `digest` is 16 bytes of BLAKE2b over the other fields."""
    result = pb.Fingerprint(
        weights_digest=model.weights_digest,
        quantization=model.quantization,
        kv_dtype=model.kv_dtype,
        tokenizer_digest=model.tokenizer_digest,
        numerics_class=model.numerics_class,
    )
    named = "\n".join(f"{field.name}={value}" for field, value in result.ListFields())
    result.digest = hashlib.blake2b(named.encode(), digest_size=16).digest()
    return result


def asset(name: str, path: Path) -> pb.Asset:
    content = path.read_bytes()
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return pb.Asset(name=name, digest=digest, num_bytes=len(content))


def check_model(card: pb.ModelCard, wanted: pb.ModelRef) -> None:
    """Raise unless a request means the model that this worker serves, to the last weight."""
    if wanted.model_id != card.model_id:
        raise ModelNotFound(f"this worker serves {card.model_id!r}, the request names {wanted.model_id!r}")
    if wanted.fingerprint != card.fingerprint.digest:
        raise FingerprintMismatch(
            f"the request was made for fingerprint {wanted.fingerprint.hex()} of {card.model_id!r}, "
            f"this worker has {card.fingerprint.digest.hex()}; restart the workers on the same weights",
            field="model.fingerprint",
        )


def _generation_defaults(given: dict[str, float]) -> pb.GenerationDefaults:
    defaults = pb.GenerationDefaults()
    for name, value in given.items():
        if name in ("top_k", "max_tokens"):
            setattr(defaults, name, int(value))
        elif name in defaults.DESCRIPTOR.fields_by_name:
            setattr(defaults, name, value)
    return defaults

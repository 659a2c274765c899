"""The model card of a worker: the model, its KV layout, and the checkpoint's files that gateways may fetch."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.encoder.messages import EncoderReady
from tandem_runtime.errors import FingerprintMismatch, KvNotFound, ModelNotFound
from tandem_runtime.model_table import Exactness

_CHUNK_BYTES = 1 << 20


def model_card(ready: messages.Ready, exactness: Exactness = "class") -> pb.ModelCard:
    """Return the description of a loaded model for gateways and other workers; reads the asset files for digests."""
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
        exactness=exactness,
        takes_spaces=True,
        adapters=[pb.Adapter(name=adapter.name, digest=adapter.digest) for adapter in model.adapters],
    )


def encoder_card(ready: EncoderReady) -> pb.ModelCard:
    """Return the description of a loaded encoder for gateways; reads the asset files for digests."""
    model, encoder = ready.model, ready.encoder
    return pb.ModelCard(
        model_id=model.model_id,
        fingerprint=fingerprint(model),
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        assets=[asset(name, Path(path)) for name, path in sorted(model.asset_paths.items())],
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        dtype=model.dtype,
        created_unix_seconds=int(time.time()),
        task=encoder.task,
        encoder=pb.EncoderCard(
            num_values=encoder.num_values,
            labels=encoder.labels,
            pooling=encoder.pooling,
            is_normalized=encoder.is_normalized,
            has_pairs=encoder.has_pairs,
        ),
    )


def kv_layout(layout: messages.LayoutInfo) -> pb.KvLayout:
    """Return the layout of the unsharded pool: one FULL group, and WINDOW groups for layers with a window."""
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
    """Return the values that two workers must share; `digest` is 16 bytes of BLAKE2b over the other fields."""
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


def check_model(card: pb.ModelCard, requested: pb.ModelRef) -> None:
    """Raise ModelNotFound or FingerprintMismatch unless a request names this worker's model and weights."""
    if requested.model_id != card.model_id:
        raise ModelNotFound(f"this worker serves {card.model_id!r}, the request names {requested.model_id!r}")
    if requested.fingerprint != card.fingerprint.digest:
        raise FingerprintMismatch(
            f"the request was made for fingerprint {requested.fingerprint.hex()} of {card.model_id!r}, "
            f"this worker has {card.fingerprint.digest.hex()}; ask the next worker",
            field="model.fingerprint",
        )


def check_adapter(card: pb.ModelCard, requested: pb.Adapter) -> None:
    """Raise FingerprintMismatch unless this worker has the adapter, with the same files."""
    if requested not in card.adapters:
        names = ", ".join(adapter.name for adapter in card.adapters) or "none"
        raise FingerprintMismatch(
            f"the request names adapter {requested.name!r} with digest {requested.digest}, this worker's adapters with "
            f"such digests are: {names}; ask the next worker",
            field="adapter",
        )


def _generation_defaults(values: dict[str, float]) -> pb.GenerationDefaults:
    defaults = pb.GenerationDefaults()
    for name, value in values.items():
        if name in ("top_k", "max_tokens"):
            setattr(defaults, name, int(value))
        elif name in defaults.DESCRIPTOR.fields_by_name:
            setattr(defaults, name, value)
    return defaults


class AssetStore:
    """The checkpoint's files that gateways may fetch, by digest."""

    def __init__(self) -> None:
        self._paths: dict[bytes, Path] = {}

    def offer(self, card: pb.ModelCard, paths: Mapping[str, str]) -> None:
        """Make the assets of a model card available; `paths` holds the file of each asset, by name."""
        self._paths = {asset.digest: Path(paths[asset.name]) for asset in card.assets}

    async def chunks(self, digest: bytes) -> AsyncIterator[pb.Chunk]:
        """Yield a file in chunks of 1 MiB; raises KvNotFound for an unknown digest."""
        path = self._paths.get(digest)
        if path is None:
            raise KvNotFound(f"no asset {digest.hex()} here; the worker may have been restarted on another model")
        content = await asyncio.to_thread(path.read_bytes)
        for offset in range(0, len(content), _CHUNK_BYTES):
            yield pb.Chunk(offset=offset, data=content[offset : offset + _CHUNK_BYTES])

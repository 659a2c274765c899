"""Refuses models that cannot be served, and names the reason.

Served: decoder-only text models of transformers whose layers all have plain or sliding-window attention over one KV
cache. This module refuses by the configuration; `execution.probe` refuses the rest by a trial forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.vision import SERVED

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_config(config: Any) -> None:
    """Raise ModelUnusable if the configuration names a feature that is not built."""
    for is_met, what in _REFUSALS:
        if is_met(config):
            raise _unusable(config, what)
    unbuilt = sorted(set(getattr(config, "layer_types", None) or []) - _SERVED_LAYER_TYPES)
    if unbuilt:
        raise _unusable(config, f"has layers other than full and sliding attention ({', '.join(unbuilt)})")


def check_model_class(model_class: Any, config: Any) -> None:
    """Raise ModelUnusable if the class takes no attention function, or computes the logits of every token."""
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _unusable(config, f"({model_class.__name__}) does not support attention backends of transformers")
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise _unusable(config, f"({model_class.__name__}) has no logits_to_keep: it computes every token's logits")


def context_length(config: Any, max_model_len: int | None) -> int:
    """Return the context length to serve, in tokens; raises ModelUnusable if `max_model_len` exceeds the limit.

    Some rotary embeddings change for all requests of a batch as soon as one request is long. A token would then depend
    on other requests, so such models are served up to that length only.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None and max_model_len is None:
        raise _unusable(config, "has no context length (max_position_embeddings); give --max-model-len")
    if limit is not None and max_model_len is not None and max_model_len > limit:
        raise ModelUnusable(
            f"--max-model-len {max_model_len} is more than the model's {limit} positions; lower it, or "
            "set rope_scaling in config.json"
        )
    length: int = min(filter(None, (limit, max_model_len)))
    stable = _stable_rope_length(config)
    if stable is not None and length > stable:
        raise _unusable(
            config,
            f"scales its rotary embeddings by the longest request of a batch beyond {stable} tokens, so that answers "
            f"would depend on other requests; give --max-model-len {stable} or less",
        )
    return length


def draft_context_length(config: Any, target_length: int) -> int:
    """Return the context length of a draft model, at most `target_length` tokens."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return context_length(config, target_length if limit is None else min(limit, target_length))


def _stable_rope_length(config: Any) -> int | None:
    """Return the length up to which "longrope" and "dynamic" embeddings are constant; None: at any length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    lengths = [
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in per_layer_type
        if rope.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=None)


def _unusable(config: Any, what: str) -> ModelUnusable:
    return ModelUnusable(
        f"{config.model_type} {what}; that is not built: serve a decoder-only model with plain or sliding-window "
        "attention, such as Llama, Mistral, Qwen or Mixtral"
    )


def _has(name: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config, name, None))


_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_has("is_encoder_decoder"), "is an encoder-decoder model"),
    (
        _has("vision_config"),
        f"takes images (vision_config); the text alone is served of {', '.join(sorted(SERVED))} only",
    ),
    (_has("audio_config"), "takes sound (audio_config)"),
    (_has("kv_lora_rank"), "has multi-head latent attention (kv_lora_rank)"),
    (_has("num_kv_shared_layers"), "shares KV between layers (num_kv_shared_layers)"),
    (_has("attention_chunk_size"), "has chunked attention (attention_chunk_size)"),
    (_has("quantization_config"), "is quantised (quantization_config)"),
    (_has("use_bidirectional_attention"), "attends to later tokens too (use_bidirectional_attention)"),
    (lambda config: not getattr(config, "is_causal", True), "is not causal"),
)

"""SmolLM 3: Llama whose rotary embedding is missing in some layers, with windows by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem_engine.models.lean.config import DecoderConfig
from tandem_engine.models.lean.families.llama import FAMILY as LLAMA
from tandem_engine.models.lean.family import Family, decoder_config, layer_configs


def _decoder(config: Any) -> DecoderConfig:
    layers = zip(layer_configs(config), config.no_rope_layers, strict=False)  # 1: the layer has rotary embeddings
    return decoder_config(config, tuple(layer if has_rope else replace(layer, rope=None) for layer, has_rope in layers))


FAMILY = Family(_decoder, LLAMA.layer)

"""Granite (dense): Llama with multipliers of embeddings, scores, residual branches and logits."""

from __future__ import annotations

from typing import Any

from tandem_engine.models.lean.config import DecoderConfig, NotLean
from tandem_engine.models.lean.families.llama import FAMILY as LLAMA
from tandem_engine.models.lean.family import Family, decoder_config


def _decoder(config: Any) -> DecoderConfig:
    """Divide the residual stream by the residual multiplier m, so that branches are added unscaled.

    rms_norm(x, eps) = rms_norm(x / m, eps / m^2) for m > 0; only the embeddings and the epsilon change.
    """
    multiplier = config.residual_multiplier
    if multiplier <= 0:
        raise NotLean(f"granite with a residual_multiplier of {multiplier}, where the decoder needs one above 0")
    return decoder_config(
        config,
        attention_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier / multiplier,
        norm_eps=config.rms_norm_eps / multiplier**2,
        logit_scale=1.0 / config.logits_scaling,
    )


FAMILY = Family(_decoder, LLAMA.layer)

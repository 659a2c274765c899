"""Makes the small random checkpoints of the decoder's tests, one or more per family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB_SIZE = 320
WINDOW = 16
NUM_POSITIONS = 256
_PHI3: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SHAPE = _PHI3 | {"head_dim": 24}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75,
             "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0], "long_factor": [9.0] * 6}  # fmt: skip
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
}
_MOE = {"num_experts_per_tok": 2}
_TIED = {"tie_word_embeddings": True}
_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama2": lambda: LlamaConfig(**_SHAPE),
    "llama3": lambda: LlamaConfig(**_SHAPE | _TIED, rope_parameters=dict(_LLAMA3)),
    "llama-biased": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=dict(_YARN)),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_PHI3, **_WINDOWS, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**_SHAPE | _TIED, **_WINDOWS, max_window_layers=2),
    "phi3": lambda: Phi3Config(**_PHI3, sliding_window=WINDOW,
                               rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    "phi3-long": lambda: Phi3Config(**_PHI3 | {"max_position_embeddings": 4 * NUM_POSITIONS},
                                    original_max_position_embeddings=NUM_POSITIONS, rope_parameters=dict(_LONGROPE)),
    "gemma2": lambda: Gemma2Config(**_SHAPE | _TIED, sliding_window=WINDOW, query_pre_attn_scalar=20,
                                   attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE | _TIED, sliding_window=WINDOW, query_pre_attn_scalar=20,
                                       layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                       rope_parameters={kind: dict(rope) for kind, rope in _GEMMA3_ROPE.items()}),
    "granite": lambda: GraniteConfig(**_PHI3, attention_bias=True, embedding_multiplier=6.0, residual_multiplier=0.3,
                                     attention_multiplier=0.2, logits_scaling=4.0),
    "olmo2": lambda: Olmo2Config(**_PHI3, attention_bias=True),
    "smollm3": lambda: SmolLM3Config(**_PHI3 | _TIED, **_WINDOWS, no_rope_layers=[1, 0, 1]),
    "smollm3-by-interval": lambda: SmolLM3Config(**_PHI3, no_rope_layer_interval=2, mlp_bias=True),
    "mixtral": lambda: MixtralConfig(**_SHAPE | _MOE, num_local_experts=4, sliding_window=WINDOW),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SHAPE | _MOE, num_experts=6, moe_intermediate_size=40, norm_topk_prob=True,
                                        mlp_only_layers=[1]),
    "qwen3-moe-sparse": lambda: Qwen3MoeConfig(**_SHAPE | _MOE, num_experts=5, moe_intermediate_size=40,
                                               norm_topk_prob=False, decoder_sparse_step=2),
}  # fmt: skip


def make_checkpoint(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **saving: Any) -> Path:
    """Save the small model of a kind below `folder`, if it is missing; norms and biases are random too."""
    target = folder / f"{kind}-{dtype}-{len(saving)}"
    if not target.exists():
        torch.manual_seed(11)
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.to(dtype).save_pretrained(target, **saving)
    return target

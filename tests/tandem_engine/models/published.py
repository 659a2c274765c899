"""The configurations behind Workers AI's names, as their makers published them, with small sizes.

What decides whether a model loads is kept: type, kinds of layers, scaling, ties, quantisation. Widths, depths and
vocabularies are small, so that random checkpoints can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

Make = Callable[[], Any]


def _of(model_type: str, **values: Any) -> Make:
    return lambda: AutoConfig.for_model(model_type, **{**_SIZES, **values})


def _whole(model_type: str, text: str, **values: Any) -> Make:
    """Return a configuration in parts: a text model of type `text` and a small vision tower."""
    parts: dict[str, Any] = {
        "text_config": {**_SIZES, **values, "model_type": text},
        "vision_config": {
            **TOWER,
            "model_type": "siglip_vision_model" if model_type == "gemma3" else "pixtral",
        },
    }
    return lambda: AutoConfig.for_model(model_type, **parts)


_llama3 = _of("llama", rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=False)
_llama = _of("llama", tie_word_embeddings=False)
_small_llama3 = _of("llama", rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True)
_mistral = _of("mistral", sliding_window=None, tie_word_embeddings=False)
_windowed_mistral = _of("mistral", sliding_window=64, tie_word_embeddings=False)
_qwen2 = _of("qwen2", use_sliding_window=False, tie_word_embeddings=False)
_small_qwen2 = _of("qwen2", use_sliding_window=False, tie_word_embeddings=True)
_gemma = _of("gemma", head_dim=32, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
_gpt_oss = _of(
    "gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, quantization_config={"quant_method": "mxfp4"}
)

CONFIGS: dict[str, Make] = {
    "meta-llama/Llama-3.1-8B-Instruct": _llama3,
    "meta-llama/Llama-3.1-70B-Instruct": _llama3,
    "meta-llama/Llama-3.2-1B-Instruct": _small_llama3,
    "meta-llama/Llama-3.2-3B-Instruct": _small_llama3,
    "meta-llama/Llama-3.3-70B-Instruct": _llama3,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": lambda: AutoConfig.for_model(
        "llama4", text_config={**_SIZES, "num_local_experts": 2, "attention_chunk_size": 8192}
    ),
    "meta-llama/Llama-Guard-3-8B": _llama3,
    "meta-llama/Meta-Llama-3-8B-Instruct": _llama,
    "meta-llama/Llama-2-7b-chat-hf": _of("llama", num_key_value_heads=4, tie_word_embeddings=False),
    "mistralai/Mistral-7B-Instruct-v0.1": _windowed_mistral,
    "mistralai/Mistral-7B-Instruct-v0.2": _mistral,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _whole("mistral3", "mistral", head_dim=24, sliding_window=None),
    "google/gemma-2b-it": _gemma,
    "google/gemma-7b-it": _gemma,
    "google/gemma-3-12b-it": _whole(
        "gemma3", "gemma3_text", head_dim=24, sliding_window=64, query_pre_attn_scalar=24, num_hidden_layers=6
    ),
    "google/gemma-4-26B-A4B-it": lambda: AutoConfig.for_model("gemma4", vision_config={}),
    "Qwen/Qwen1.5-0.5B-Chat": _small_qwen2,
    "Qwen/Qwen1.5-1.8B-Chat": _qwen2,
    "Qwen/Qwen1.5-7B-Chat": _qwen2,
    "Qwen/Qwen1.5-14B-Chat": _qwen2,
    "Qwen/Qwen2.5-Coder-32B-Instruct": _qwen2,
    "Qwen/QwQ-32B": _qwen2,
    "Qwen/Qwen3-30B-A3B": _of(
        "qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _qwen2,
    "deepseek-ai/deepseek-math-7b-instruct": _of("llama", num_key_value_heads=4, tie_word_embeddings=False),
    "openai/gpt-oss-20b": _gpt_oss,
    "openai/gpt-oss-120b": _gpt_oss,
    "zai-org/GLM-4.7-Flash": _of("glm4_moe_lite"),
    "ibm-granite/granite-4.0-h-micro": _of("granitemoehybrid", layer_types=["mamba", "attention"]),
    "microsoft/phi-2": _of("phi", num_key_value_heads=4, partial_rotary_factor=0.5),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama,
    "tiiuae/falcon-7b-instruct": lambda: AutoConfig.for_model(
        "falcon", vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, parallel_attn=True
    ),
    "openchat/openchat-3.5-0106": _windowed_mistral,
    "defog/sqlcoder-7b-2": _of("llama", num_key_value_heads=4, tie_word_embeddings=False),
    "Nexusflow/Starling-LM-7B-beta": _windowed_mistral,
    "NousResearch/Hermes-2-Pro-Mistral-7B": _windowed_mistral,
}
"""By Hub id: the published configuration, small."""

"""Finds the text part of a checkpoint that takes images, too.

Such a checkpoint has a configuration for each part, and the weights of a vision tower beside those of its text model.
Tandem serves the text model, which without images is a plain decoder, and leaves the tower's weights unread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig

SERVED = frozenset({"gemma3", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"})
"""Types of checkpoints whose text model reads text as a plain decoder does. Others (PaliGemma) do not."""

_PLAIN_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models that differ from the plain one by the positions of images alone: a text token's three are equal."""
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved", "type")

_PREFIXES = (
    ("language_model.model.", "model."),  # Gemma 3, Llama 4, LLaVA, Mistral Small
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),  # Qwen3-VL, and all that transformers 5 saves
)
_NOT_TEXT = tuple(
    f"{prefix}{module}."
    for prefix in ("", "model.")
    for module in ("visual", "vision_tower", "vision_model", "multi_modal_projector")
)
KEY_MAPPING = {f"^{theirs.replace('.', '[.]')}": plain for theirs, plain in _PREFIXES}
"""The same names for `from_pretrained`: pattern -> replacement."""


def text_name(stored: str) -> str | None:
    """Return a tensor's name in a checkpoint of the text model alone; None for a part of the vision tower."""
    if stored.startswith(_NOT_TEXT):
        return None
    for theirs, plain in _PREFIXES:
        if stored.startswith(theirs):
            return plain + stored.removeprefix(theirs)
    return stored


def text_config(config: Any, stored_names: Iterable[str]) -> Any:
    """Return the transformers configuration of the text model; one without images, or not served, is returned as it is.

    `stored_names` are the checkpoint's tensors. The head is tied to the embeddings only if no head is stored: the
    configuration's parts contradict each other there (Mistral Small 3.1).
    """
    if getattr(config, "vision_config", None) is None or config.model_type not in SERVED:
        return config
    text = config.get_text_config(decoder=True)
    if plain_type := _PLAIN_TYPES.get(text.model_type):
        text = _plain(text, plain_type)
    is_tied = config.tie_word_embeddings or text.tie_word_embeddings
    text.tie_word_embeddings = bool(is_tied) and "lm_head.weight" not in map(text_name, stored_names)
    for name in ("eos_token_id", "dtype"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text


def _plain(text: Any, plain_type: str) -> Any:
    values = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {name: value for name, value in rope.items() if name not in _IMAGE_POSITIONS}
    return AutoConfig.for_model(plain_type, **values)

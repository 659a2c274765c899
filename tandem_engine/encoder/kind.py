"""Decides what a checkpoint is to an encode worker, or refuses the checkpoint by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tandem_engine.encoder.families import FAMILIES
from tandem_engine.encoder.messages import EncoderInfo
from tandem_engine.encoder.sentence_files import SentenceFiles, read_sentence_files
from tandem_engine.errors import ModelUnusable
from tandem_engine.models.checkpoint import Checkpoint
from tandem_engine.models.lean.registry import FAMILIES as DECODER_FAMILIES

_HEAD = "ForSequenceClassification"
_WITHOUT_HEAD = ("Model", "ForMaskedLM", "ForPreTraining", "ForCausalLM")
_BARE = SentenceFiles(pooling="mean", is_normalized=False, max_tokens=None)

Scores = Literal["softmax", "sigmoid", "raw"]


@dataclass(frozen=True)
class Kind:
    """What a checkpoint is."""

    is_decoder: bool
    """The layers are a decoder's, with causal attention."""
    has_head: bool
    """A head for classification; else the model makes embeddings, as `files` say."""
    files: SentenceFiles


def find_kind(checkpoint: Checkpoint) -> Kind:
    """Return what a checkpoint is; raises ModelUnusable for a model that is not served here."""
    config = _raw_config(checkpoint)
    model_type, architecture = str(config.get("model_type", "")), _architecture(config)
    if config.get("auto_map"):
        raise ModelUnusable(
            f"{checkpoint.model_id} ({model_type}) comes with code of its own (auto_map), and code that comes with a "
            f"checkpoint is never run; choose a model of type {_served()}"
        )
    files = read_sentence_files(checkpoint.folder)
    if model_type in FAMILIES:
        return Kind(False, _has_head(checkpoint, architecture) and files is None, files or _BARE)
    if model_type not in DECODER_FAMILIES:
        raise ModelUnusable(
            f"{checkpoint.model_id} is of type {model_type or 'unknown'}, which is not built as an encoder; choose a "
            f"model of type {_served()}, or an embedding model of {', '.join(sorted(DECODER_FAMILIES))}"
        )
    if config.get("use_bidirectional_attention"):
        raise ModelUnusable(
            f"{checkpoint.model_id} reads a text in both directions with a decoder's layers "
            f"(use_bidirectional_attention), which is not built; choose a model of type {_served()}"
        )
    if files is None:
        raise ModelUnusable(
            f"{checkpoint.model_id} ({architecture or model_type}) is a model that generates text: it has no "
            "modules.json; serve it with prefill and decode workers, or choose an embedding model"
        )
    return Kind(True, False, files)


def embedding_info(files: SentenceFiles, hidden_size: int) -> EncoderInfo:
    """Return what an embedding model makes of an input."""
    return EncoderInfo("text-embedding", hidden_size, [], files.pooling, files.is_normalized, has_pairs=False)


def head_info(config: Any) -> EncoderInfo:
    """Return what a model with a head makes of an input: one label ranks, several classify."""
    if config.num_labels == 1:
        return EncoderInfo("text-ranking", 1, [], "", is_normalized=False, has_pairs=True)
    labels = [str(config.id2label.get(index, f"LABEL_{index}")) for index in range(config.num_labels)]
    return EncoderInfo("text-classification", len(labels), labels, "", is_normalized=False, has_pairs=True)


def scores_of(config: Any) -> Scores:
    """Return what a head's logits become; raises ModelUnusable for a regression of several values."""
    if config.num_labels == 1:
        return "raw"
    if config.problem_type == "regression":
        raise ModelUnusable(f"{config.model_type} is a regression of {config.num_labels} values; that is not built")
    return "sigmoid" if config.problem_type == "multi_label_classification" else "softmax"


def _has_head(checkpoint: Checkpoint, architecture: str) -> bool:
    if architecture.endswith(_HEAD):
        return True
    if architecture and not architecture.endswith(_WITHOUT_HEAD):
        raise ModelUnusable(
            f"{checkpoint.model_id} is a {architecture}, whose head is not built; choose an embedding model, a "
            f"*{_HEAD} or a reranker"
        )
    return False


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or [""]
    return str(names[0])


def _raw_config(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnusable(f"{path} cannot be read: {error}; download the checkpoint anew") from error
    if not isinstance(config, dict):
        raise ModelUnusable(f"{path} has a {type(config).__name__}; download the checkpoint anew")
    return config


def _served() -> str:
    return ", ".join(FAMILIES)

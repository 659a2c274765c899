"""Makes small random encoders with transformers' own classes, and the files of sentence-transformers beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.checkpoints import VOCAB_SIZE, byte_level_tokenizer

NUM_POSITIONS = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-7,
}
_ROBERTA: dict[str, Any] = {**_SHAPE, "type_vocab_size": 1, "max_position_embeddings": NUM_POSITIONS + 2}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "dim": 72,
    "hidden_dim": 136,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": lambda: BertModel(BertConfig(**_SHAPE)),
    "roberta": lambda: RobertaModel(RobertaConfig(**_ROBERTA)),
    "xlm-roberta": lambda: XLMRobertaModel(XLMRobertaConfig(**_ROBERTA)),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(**_DISTILBERT)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**_QWEN3)),
    "qwen3-causal": lambda: Qwen3ForCausalLM(Qwen3Config(**_QWEN3)),
}
HEADS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "bert": lambda labels: BertForSequenceClassification(BertConfig(**_SHAPE, **labels)),
    "roberta": lambda labels: RobertaForSequenceClassification(RobertaConfig(**_ROBERTA, **labels)),
    "xlm-roberta": lambda labels: XLMRobertaForSequenceClassification(XLMRobertaConfig(**_ROBERTA, **labels)),
    "distilbert": lambda labels: DistilBertForSequenceClassification(DistilBertConfig(**_DISTILBERT, **labels)),
}


def save(model: PreTrainedModel, folder: Path, *, is_noisy: bool = True) -> PreTrainedModel:
    """Write a model and a tokenizer; return the model, ready to run. Its norms and biases are random too."""
    if is_noisy:
        _disturb(model)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    model.eval()
    return model


def make(kind: str, folder: Path) -> PreTrainedModel:
    """Write a bare model of that kind."""
    torch.manual_seed(7)
    return save(MODELS[kind](), folder)


def make_with_head(kind: str, folder: Path, num_labels: int, **values: Any) -> PreTrainedModel:
    """Write a `*ForSequenceClassification` of that kind; `values` are its configuration's."""
    torch.manual_seed(8)
    names = {index: f"class {index}" for index in range(num_labels)}
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    return save(HEADS[kind](labels | values), folder)


def write_sentence_files(folder: Path, mode: str, *, is_normalized: bool = True, max_tokens: int | None = None) -> None:
    """Write the files of sentence-transformers; `mode` is the entry of the pooling that is true."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    write(
        folder / "modules.json",
        [
            {"path": path, "type": f"sentence_transformers.models.{name}"}
            for name, path in zip(modules, paths, strict=False)
        ],
    )
    modes = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"), False)
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 72, **modes, mode: True})
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _disturb(model: PreTrainedModel) -> None:
    """Make vectors random, which transformers initialises with zeros and ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)

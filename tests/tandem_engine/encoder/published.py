"""Random checkpoints in the configurations of the encoders behind Workers AI's names, in small sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.tandem_engine.encoder.checkpoints import make, make_with_head, write_sentence_files
from tests.tandem_engine.models.published import CONFIGS


def _embedder(kind: str, mode: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        make(kind, folder)
        write_sentence_files(folder, mode)

    return write


def _gemma(folder: Path) -> None:
    make("bert", folder)
    config = CONFIGS["google/gemma-3-12b-it"]().text_config
    config.use_bidirectional_attention = True
    config.save_pretrained(folder)
    write_sentence_files(folder, "pooling_mode_mean_tokens")


ENCODERS: dict[str, Callable[[Path], object]] = {
    "BAAI/bge-small-en-v1.5": _embedder("bert", "pooling_mode_cls_token"),
    "BAAI/bge-base-en-v1.5": _embedder("bert", "pooling_mode_cls_token"),
    "BAAI/bge-large-en-v1.5": _embedder("bert", "pooling_mode_cls_token"),
    "BAAI/bge-m3": _embedder("xlm-roberta", "pooling_mode_cls_token"),
    "BAAI/bge-reranker-base": lambda folder: make_with_head("xlm-roberta", folder, 1),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": lambda folder: make_with_head(
        "distilbert", folder, 2
    ),
    "Qwen/Qwen3-Embedding-0.6B": _embedder("qwen3-causal", "pooling_mode_lasttoken"),
    "google/embeddinggemma-300m": _gemma,
}
"""By Hub id: writes the checkpoint into a folder."""

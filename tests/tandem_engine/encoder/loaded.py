"""Loads encoders in this process, and makes random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tandem_engine.encoder.batch import Encoder, EncoderInput, TokenIds
from tandem_engine.encoder.load import LoadedEncoder, load_encoder
from tandem_engine.encoder.messages import Pooling
from tandem_engine.settings import EngineConfig
from tests.checkpoints import VOCAB_SIZE

FIRST_ID = 2
"""Random ids start behind those of padding: transformers' RoBERTa counts no positions for padding."""


@cache
def load(folder: Path, kernels: str = "auto") -> Encoder:
    """Return the encoder of a folder, which does not change."""
    return loaded(folder, kernels=kernels).encoder


def loaded(folder: Path, **values: Any) -> LoadedEncoder:
    """Load a folder; keywords are EngineConfig's."""
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "encodes": True} | values
    return load_encoder(EngineConfig(model=str(folder), **settings), lambda stage, fraction: None)


def random_ids(generator: np.random.Generator, num_tokens: int, vocab_size: int = VOCAB_SIZE) -> TokenIds:
    return generator.integers(FIRST_ID, vocab_size, num_tokens).astype(np.uint32)


def random_texts(lengths: Sequence[int], *, pairs: bool = False, pooling: Pooling | None = None) -> list[EncoderInput]:
    """Return inputs of these lengths; with `pairs`, of two texts where there is room."""
    generator = np.random.default_rng(5)
    return [
        EncoderInput(random_ids(generator, length), max(1, length // 3) if pairs and length > 1 else 0, pooling)
        for length in lengths
    ]


def assert_close(values: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    """Compare [num_inputs, num_values] with a reference: direction, and the largest error of a number."""
    ours, theirs = torch.from_numpy(values).double(), expected.double()
    if ours.shape[1] > 1:
        assert functional.cosine_similarity(ours, theirs).min() >= 0.9999
    assert (ours - theirs).abs().max() <= 2e-5 * max(1.0, float(theirs.abs().max()))

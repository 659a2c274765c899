"""Builds the core of an encode worker's engine."""

from __future__ import annotations

import torch

from tandem_engine.cores import num_threads
from tandem_engine.encoder.core import EncoderCore
from tandem_engine.encoder.load import load_encoder
from tandem_engine.encoder.messages import EncoderReady
from tandem_engine.models.checkpoint import Progress
from tandem_engine.settings import EngineConfig


def assemble_encoder(
    config: EngineConfig, report: Progress, numa_node: int | None = None
) -> tuple[EncoderCore, EncoderReady]:
    """Load the model and return its core; raises ModelUnusable, whose message names the remedy.

    `numa_node` is where this process's memory comes from, as `use_memory_node` returns it.
    """
    torch.set_num_threads(num_threads(config))
    loaded = load_encoder(config, report, numa_node)
    core = EncoderCore(loaded.encoder, config.max_num_batched_tokens, config.max_num_waiting)
    return core, EncoderReady(loaded.info, loaded.encoder.info, numa_node)

"""Turns a checkpoint into an encoder that is ready to run."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem_engine.encoder.batch import Encoder, EncoderInput
from tandem_engine.encoder.config import EncoderConfig
from tandem_engine.encoder.embedder import DecoderEmbedder, bare_family
from tandem_engine.encoder.families import FAMILIES, EncoderFamily
from tandem_engine.encoder.heads import ClassificationHead, EmbeddingHead, Head
from tandem_engine.encoder.kind import Kind, embedding_info, find_kind, head_info, scores_of
from tandem_engine.encoder.sizes import check_sizes
from tandem_engine.encoder.stack import EncoderStack
from tandem_engine.encoder.text_encoder import TextEncoder
from tandem_engine.errors import ModelUnusable
from tandem_engine.messages import ModelInfo
from tandem_engine.models.card import Numerics, describe, weights_digest
from tandem_engine.models.checkpoint import Checkpoint, Progress, find_checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.models.lean.checkpoint_reader import CheckpointReader
from tandem_engine.models.lean.config import NotLean
from tandem_engine.models.lean.load import (
    Entries,
    LeanRequest,
    load_decoder,
    packed_entries,
    plan_names,
    store,
    stored_dtype,
)
from tandem_engine.models.lean.registry import find_family
from tandem_engine.models.lean.weights import LeanWeights
from tandem_engine.models.loader import node_with_a_copy, ops_for, read_config
from tandem_engine.models.placement import choose_device, numerics_class
from tandem_engine.models.support import check_config, context_length
from tandem_engine.ops.base import Ops
from tandem_engine.settings import DtypeChoice, EngineConfig

_TRIAL_TOKENS = 8


@dataclass(frozen=True)
class LoadedEncoder:
    encoder: Encoder
    info: ModelInfo


@dataclass(frozen=True)
class _Job:
    """What loading one model needs."""

    config: EngineConfig
    checkpoint: Checkpoint
    model_config: Any
    kind: Kind
    ops: Ops
    device: torch.device
    state_dir: Path | None
    digests: DigestCache
    report: Progress
    numa_node: int | None


@dataclass(frozen=True)
class _Storage:
    """`tandem_engine.models.lean.load.StorageRequest`."""

    dtype: DtypeChoice
    device: torch.device
    state_dir: Path | None
    weights_digest: str
    is_verified: bool
    numa_node: int | None


def load_encoder(config: EngineConfig, report: Progress, numa_node: int | None = None) -> LoadedEncoder:
    """Find, check and load the model and encode a trial input; raises ModelUnusable with the remedy.

    `numa_node` is where this process's memory comes from.
    """
    checkpoint = find_checkpoint(config.model, config.served_model_name, report, config.revision)
    kind = find_kind(checkpoint)
    if config.dtype not in ("auto", "float32"):
        raise ModelUnusable(f"--dtype {config.dtype}, but encoders compute in float32; take auto")
    device = choose_device(config.device)
    state_dir = Path(config.state_dir).expanduser() if config.state_dir else None
    job = _Job(
        config=config,
        checkpoint=checkpoint,
        model_config=read_config(checkpoint),
        kind=kind,
        ops=ops_for(config, device, torch.float32, report),
        device=device,
        state_dir=state_dir,
        digests=DigestCache(state_dir, lambda what: report(what, 0.1)),
        report=report,
        numa_node=numa_node,
    )
    report("computing the weights' digest", 0.1)
    weights_digest(checkpoint, job.digests)
    report(f"reading {checkpoint.num_weight_bytes / 1e6:,.0f} MB of weights", 0.2)
    try:
        encoder = _decoder_based(job) if kind.is_decoder else _text_encoder(job)
    except NotLean as error:
        raise ModelUnusable(f"{error}; choose another model") from error
    _try(encoder, checkpoint)
    return LoadedEncoder(encoder, _describe(job, encoder))


def _text_encoder(job: _Job) -> Encoder:
    config, family, kind = job.model_config, FAMILIES[job.model_config.model_type], job.kind
    shape = family.encoder(config)
    info = head_info(config) if kind.has_head else embedding_info(kind.files, shape.hidden_size)
    weights = _weights(job, family, shape)
    check_sizes(shape, info.num_values, weights, job.checkpoint.folder)
    stack = EncoderStack(shape, weights, job.ops)
    head = _head(job, family, weights) if kind.has_head else EmbeddingHead(info, kind.files.pooling)
    return TextEncoder(stack, head, _context_length(job, shape.num_positions), job.device)


def _head(job: _Job, family: EncoderFamily, weights: LeanWeights) -> Head:
    return ClassificationHead(
        info=head_info(job.model_config),
        ops=job.ops,
        dense=weights.linears["head_dense"],
        activation=family.head.activation,
        output=weights.linears["head_output"],
        scores=scores_of(job.model_config),
    )


def _weights(job: _Job, family: EncoderFamily, shape: EncoderConfig) -> LeanWeights:
    reader = CheckpointReader(job.checkpoint.folder)
    plan = family.plan(shape, reader.names, has_head=job.kind.has_head)
    _check_layers(family, reader.names - reader.check_present(plan), job.checkpoint.folder)
    dtype = stored_dtype(job.config.dtype, shape.model_type)

    def entries() -> Entries:
        return packed_entries(plan, reader, dtype, job.device, job.ops)

    return store(_storage(job), plan_names(plan), entries, job.ops, lambda what: job.report(what, 0.3))


def _check_layers(family: EncoderFamily, unread: Set[str], folder: Path) -> None:
    """Refuse a checkpoint whose layers have weights that the encoder lacks: its results would differ."""
    if unknown := sorted(name for name in unread if f"{family.layers}." in name):
        raise ModelUnusable(
            f"{folder} has {len(unknown)} weights that the encoder lacks, {unknown[0]} first; choose another model"
        )


def _decoder_based(job: _Job) -> Encoder:
    check_config(job.model_config)
    family = find_family(job.model_config)
    assert family is not None, "the kind was found by the families"
    length = _context_length(job, context_length(job.model_config, None))
    storage = _storage(job)
    request = LeanRequest(
        folder=job.checkpoint.folder,
        config=job.model_config,
        family=bare_family(family, CheckpointReader(job.checkpoint.folder).names),
        num_positions=length,
        **{each.name: getattr(storage, each.name) for each in fields(storage)},
    )
    decoder = load_decoder(request, job.ops, lambda what: job.report(what, 0.3))
    head = EmbeddingHead(embedding_info(job.kind.files, decoder.config.hidden_size), job.kind.files.pooling)
    return DecoderEmbedder(decoder, head, length, job.device)


def _storage(job: _Job) -> _Storage:
    return _Storage(
        dtype=job.config.dtype,
        device=job.device,
        state_dir=job.state_dir,
        weights_digest=weights_digest(job.checkpoint, job.digests),
        is_verified=job.config.verify_weights,
        numa_node=node_with_a_copy(job.numa_node, job.checkpoint),
    )


def _context_length(job: _Job, num_positions: int) -> int:
    """Return the longest input in tokens: as configured, else that of sentence-transformers' files or the positions."""
    asked = job.config.max_model_len
    if asked is None:
        return min(num_positions, job.kind.files.max_tokens or num_positions)
    if asked > num_positions:
        raise ModelUnusable(f"--max-model-len {asked} is more than the model's {num_positions} positions; lower it")
    return asked


def _try(encoder: Encoder, checkpoint: Checkpoint) -> None:
    """Raise ModelUnusable if a short input gives values that are not finite."""
    num_tokens = min(_TRIAL_TOKENS, encoder.vocab_size, encoder.context_length)
    values = encoder.encode([EncoderInput(np.arange(num_tokens, dtype=np.uint32), 0)])
    if not np.isfinite(values).all():
        raise ModelUnusable(f"{checkpoint.folder} gives values that are not finite; download the checkpoint anew")


def _describe(job: _Job, encoder: Encoder) -> ModelInfo:
    """Return the facts for other processes; torch computes tanh and exp, whose bits depend on its instructions."""
    route = "encoder-of-decoder" if job.kind.is_decoder else "encoder"
    name = numerics_class(job.ops, route, job.device, torch.float32, job.model_config.model_type, with_capability=True)
    architecture = (getattr(job.model_config, "architectures", None) or [job.model_config.model_type])[0]
    numerics = Numerics(name, architecture, torch.float32, job.device)
    return describe(job.checkpoint, job.model_config, encoder.context_length, numerics, job.digests)

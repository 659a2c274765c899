"""Turns a checkpoint into a model that is ready to run.

There are two routes. The lean route is our own decoder for the families that most people serve. The compatibility route
runs transformers' code with our attention (`transformers_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem_engine.cores import num_threads, pinned_cores
from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.execution.kv_groups import choose_groups
from tandem_engine.execution.model import Model
from tandem_engine.messages import ModelInfo
from tandem_engine.models.card import Numerics, describe, weights_digest
from tandem_engine.models.checkpoint import Checkpoint, Progress, find_checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.models.lean.config import DecoderConfig, NotLean
from tandem_engine.models.lean.family import Family
from tandem_engine.models.lean.load import LeanRequest, load_decoder
from tandem_engine.models.placement import choose_device, choose_dtype, choose_route, numerics_class
from tandem_engine.models.support import check_config, context_length, draft_context_length
from tandem_engine.models.vision import text_config
from tandem_engine.ops.base import Ops
from tandem_engine.ops.choice import choose_ops
from tandem_engine.ops.cpu import KernelsUnavailable
from tandem_engine.settings import EngineConfig
from tandem_machine.nodes import total_bytes_of


@dataclass(frozen=True)
class LoadedModel:
    model: Model
    ops: Ops
    info: ModelInfo
    geometry: KVGeometry
    device: torch.device
    mapped_bytes: int = 0
    """Bytes of the weights that lie in mapped files."""
    weight_bytes: int = 0
    """Bytes of the checkpoint's weights; 0: not known."""
    window: int | None = None
    """The largest attention window of all layers, in positions; None: some layer has no window."""
    is_batch_invariant: bool = True
    """Whether a token's bits are the same whatever else is in its step."""


@dataclass(frozen=True)
class _Job:
    """What loading one model needs; `length` is the longest context in tokens."""

    config: EngineConfig
    checkpoint: Checkpoint
    model_config: Any
    length: int
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    digests: DigestCache
    report: Progress
    numa_node: int | None


@dataclass(frozen=True)
class _Built:
    model: Model
    architecture: str
    route: str
    geometry: KVGeometry
    windows: Sequence[int | None]
    """One entry per layer."""
    is_batch_invariant: bool
    mapped_bytes: int = 0
    needs_torch_capability: bool = True
    """Torch computes some of its values, whose bits depend on the vector instructions that torch uses."""


def load_model(
    config: EngineConfig, report: Progress, target: LoadedModel | None = None, numa_node: int | None = None
) -> LoadedModel:
    """Find, check and load the model and run a trial forward; raises ModelUnusable with the remedy.

    With `target`, the model is a draft model: it shares the target's op layer, its context is at most as long, and its
    KV has one group. `numa_node` is where this process's memory comes from.
    """
    checkpoint = find_checkpoint(config.model, config.served_model_name, report, config.revision)
    model_config = text_config(read_config(checkpoint), checkpoint.tensor_shapes)
    check_config(model_config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model_config, device)
    family = choose_route(config.route, model_config, device, dtype)
    job = _Job(
        config=config,
        checkpoint=checkpoint,
        model_config=model_config,
        length=_length(config, model_config, target),
        device=device,
        dtype=dtype,
        ops=ops_for(config, device, dtype, report) if target is None else target.ops,
        digests=DigestCache(
            Path(config.state_dir).expanduser() if config.state_dir else None, lambda what: report(what, 0.1)
        ),
        report=report,
        numa_node=numa_node,
    )
    report("computing the weights' digest", 0.1)
    weights_digest(checkpoint, job.digests)
    report(f"reading {checkpoint.num_weight_bytes / 1e6:,.0f} MB of weights", 0.2)
    built = _build(job, family)
    name = numerics_class(
        job.ops, built.route, device, dtype, model_config.model_type, with_capability=built.needs_torch_capability
    )
    if config.numerics_tag:
        name = f"{name}/{config.numerics_tag}"
    numerics = Numerics(name, built.architecture, dtype, device)
    info = describe(checkpoint, model_config, job.length, numerics, job.digests)
    longest_context = getattr(model_config, "max_position_embeddings", None)
    groups = choose_groups(built.windows, longest_context) if target is None else ()
    geometry = replace(built.geometry, order=job.ops.kv_order, groups=groups)
    window = _widest(built.windows)
    return LoadedModel(
        built.model,
        job.ops,
        info,
        geometry,
        device,
        built.mapped_bytes,
        checkpoint.num_weight_bytes,
        window,
        built.is_batch_invariant,
    )


def _length(config: EngineConfig, model_config: Any, target: LoadedModel | None) -> int:
    if target is None:
        return context_length(model_config, config.max_model_len)
    return draft_context_length(model_config, target.info.context_length)


def _widest(windows: Sequence[int | None]) -> int | None:
    limits = [window for window in windows if window is not None]
    return max(limits) if len(limits) == len(windows) else None


def ops_for(config: EngineConfig, device: torch.device, dtype: torch.dtype, report: Progress) -> Ops:
    """Return the op layer that the configuration asks for; raises ModelUnusable."""
    threads, cores = num_threads(config), pinned_cores(config)
    try:
        return choose_ops(config.kernels, device, dtype, threads, lambda what: report(what, 0.05), cores)
    except KernelsUnavailable as error:
        raise ModelUnusable(f"{error}; or take --kernels auto") from error


def _build(job: _Job, family: Family | None) -> _Built:
    if family is not None:
        try:
            return _build_lean(job, family)
        except NotLean as error:
            if job.config.route == "lean":
                raise ModelUnusable(f"{error}; take --route auto") from error
            job.report(f"taking the compatibility route, which is slower: {error}", 0.2)
    return _build_transformers(job)


def _build_lean(job: _Job, family: Family) -> _Built:
    request = LeanRequest(
        folder=job.checkpoint.folder,
        config=job.model_config,
        family=family,
        num_positions=job.length,
        dtype=job.config.dtype,
        device=job.device,
        state_dir=Path(job.config.state_dir).expanduser() if job.config.state_dir else None,
        weights_digest=weights_digest(job.checkpoint, job.digests),
        is_verified=job.config.verify_weights,
        numa_node=node_with_a_copy(job.numa_node, job.checkpoint),
    )
    decoder = load_decoder(request, job.ops, lambda what: job.report(what, 0.3))
    geometry = _geometry(decoder.config, job.config.block_size)
    windows = [layer.window for layer in decoder.config.layers]
    return _Built(
        decoder,
        _architecture(job.model_config),
        "lean",
        geometry,
        windows,
        is_batch_invariant=True,
        mapped_bytes=decoder.weights.mapped_bytes,
        needs_torch_capability=any(layer.experts for layer in decoder.config.layers),
    )


def node_with_a_copy(numa_node: int | None, checkpoint: Checkpoint) -> int | None:
    """Return the node whose workers share a copy of the weights; None: they share the copy of all nodes.

    Each decode step reads all weights, so those of another node would be as slow as the link between the nodes. A copy
    may take half of a node's memory: beyond it the copies of all nodes could fill the machine, and the kernel would
    read dropped pages from disk again.
    """
    if numa_node is None or 2 * checkpoint.num_weight_bytes > total_bytes_of(numa_node):
        return None
    return numa_node


def _geometry(config: DecoderConfig, block_size: int) -> KVGeometry:
    return KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim, block_size, torch.float32)


def _build_transformers(job: _Job) -> _Built:
    # Imported here: the lean route does without transformers' model code.
    from tandem_engine.models.transformers_model import ROUTE_NAME, load_transformers_model

    loaded = load_transformers_model(
        job.checkpoint, job.model_config, job.dtype, job.device, job.ops, job.config, job.report
    )
    return _Built(
        loaded.model, loaded.architecture, ROUTE_NAME, loaded.geometry, loaded.windows, is_batch_invariant=False
    )


def read_config(checkpoint: Checkpoint) -> Any:
    """Return the transformers configuration; raises ModelUnusable."""
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelUnusable(
            f"transformers {transformers.__version__} cannot read {checkpoint.folder / 'config.json'}: {error}; "
            "code that comes with a checkpoint is never run"
        ) from error


def _architecture(model_config: Any) -> str:
    """Return the name of transformers' class without importing the class."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_config.model_type]
    return name if isinstance(name, str) else name[0]

"""Describes the model that vLLM has loaded, as our own engine describes its models."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.block_order import BlockShape
from tandem_engine.layout import GroupInfo, LayoutInfo
from tandem_engine.messages import ModelInfo
from tandem_engine.models.card import Numerics, describe
from tandem_engine.models.checkpoint import Checkpoint
from tandem_engine.models.digest import DigestCache
from tandem_engine.scheduling.numerics import BATCH_DEPENDENT
from tandem_vllm.block_order import Write, order_of

_PLAIN_SPECS = {"FullAttentionSpec", "SlidingWindowSpec"}
"""vLLM's descriptions of layers whose blocks have keys and values of every token."""


def describe_model(
    checkpoint: Checkpoint, config: VllmConfig, context_length: int, numerics_tag: str, digests: DigestCache
) -> ModelInfo:
    """Return the facts of the checkpoint as vLLM serves it."""
    model = config.model_config
    device = torch.device(config.device_config.device_type)
    architecture = str(model.architecture)
    numerics = Numerics(_numerics_class(config, device, numerics_tag), architecture, model.dtype, device)
    info = describe(checkpoint, model.hf_text_config, context_length, numerics, digests)
    return replace(info, quantization=str(model.quantization or ""), kv_dtype=_kv_dtype(config))


def layer_names(core: EngineCore) -> list[str]:
    """Return the names of the layers in one group, in the order of the model."""
    (group,) = core.scheduler.kv_cache_config.kv_cache_groups
    return sorted(group.layer_names, key=extract_layer_index)


def window_of_all(core: EngineCore) -> int | None:
    """Return the window behind which vLLM frees blocks of all layers; None: it keeps all blocks of a request."""
    groups: list[Any] = core.scheduler.kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    return max((spec.sliding_window for spec in specs), default=None) if _have_windows(specs) else None


def _have_windows(specs: list[Any]) -> bool:
    return all(isinstance(spec, SlidingWindowSpec) for spec in specs)


def layout(core: EngineCore) -> LayoutInfo:
    """Return the layout of vLLM's pool, as a block of all layers one after another has it.

    An order with a name of `tandem_engine.execution.block_order` is converted by engines with other orders; one with
    vLLM's name is read by vLLM's engines alone.
    """
    groups: list[Any] = core.scheduler.kv_cache_config.kv_cache_groups
    numbers = {name: index for index, name in enumerate(name for group in groups for name in group.layer_names)}
    spec = groups[0].kv_cache_spec
    head_size = getattr(spec, "head_size", 0)
    return LayoutInfo(
        num_layers=len(numbers),
        tokens_per_block=spec.block_size,
        num_kv_heads=getattr(spec, "num_kv_heads", 1),
        k_head_size=head_size,
        v_head_size=getattr(spec, "head_size_v", head_size),
        dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
        order=_order(core),
        bytes_per_block=spec.page_size_bytes * len(groups[0].layer_names),
        groups=[]
        if len(groups) == 1
        else [
            GroupInfo(
                [numbers[name] for name in group.layer_names], getattr(group.kv_cache_spec, "sliding_window", None)
            )
            for group in groups
        ],
    )


def _order(core: EngineCore) -> str:
    """Return the order that vLLM's backends write blocks in: Tandem's name if it has one, else vLLM's own.

    vLLM's name has no difference between its CPU kernels, which read only their own blocks, so theirs is added. Raises
    ModelUnusable where the backend cannot write the model's blocks. With several ranks the pool is in their processes,
    and nobody reads it.
    """
    cache = core.scheduler.kv_cache_config
    if (num_ranks := core.vllm_config.parallel_config.world_size) > 1:
        return f"vllm-{cache.kv_cache_layout}-ranks{num_ranks}"
    runner: Any = core.model_executor.driver_worker.worker.model_runner
    context: dict[str, Any] = runner.compilation_config.static_forward_context
    attention = [context[name] for group in cache.kv_cache_groups for name in group.layer_names]
    kernels = "+".join(sorted({str(layer.isa) for layer in attention if hasattr(layer, "isa")}))
    order = None
    can_write = all(hasattr(layer.impl, "do_kv_cache_update") for layer in attention)
    if can_write and all(_is_plain(group.kv_cache_spec, runner.dtype) for group in cache.kv_cache_groups):
        spec: Any = cache.kv_cache_groups[0].kv_cache_spec
        shape = BlockShape(1, spec.num_kv_heads, spec.block_size, spec.head_size)
        try:
            order = order_of([layer.kv_cache for layer in attention], [_write_of(layer) for layer in attention], shape)
        except RuntimeError as error:  # so would the first request's prompt
            raise ModelUnusable(f"vLLM's attention on this machine cannot store keys of this model: {error}") from error
    return order or "-".join(["vllm", str(cache.kv_cache_layout), *([kernels] if kernels else [])])


def _is_plain(spec: Any, dtype: torch.dtype) -> bool:
    """Whether blocks have keys and values of one size, in the dtype that the model computes them in."""
    head_size = getattr(spec, "head_size", 0)
    return bool(spec.__class__.__name__ in _PLAIN_SPECS and head_size == spec.head_size_v and spec.dtype == dtype)


def _write_of(layer: Any) -> Write:
    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    return write


def _numerics_class(config: VllmConfig, device: torch.device, tag: str) -> str:
    """Return the name of everything that decides how numbers round.

    It promises that the draw is a function of logits, seed, position and answer, and that a migrated answer is drawn
    from the same distribution. It does not promise equal logits: rounding depends on the other requests of a step.
    """
    model = config.model_config
    where = device.type
    if device.type == "cpu":
        where = f"cpu-{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '-')}"
    elif device.type == "cuda":
        where = f"cuda-{torch.cuda.get_device_name(device).lower().replace(' ', '-')}"
    dtype = str(model.dtype).removeprefix("torch.")
    name = f"vllm-{vllm.__version__.split('+')[0]}/{where}/{dtype}/{model.hf_text_config.model_type}/{_ranks(config)}"
    return "/".join([name, f"fast-{BATCH_DEPENDENT}", *([tag] if tag else [])])


def _ranks(config: VllmConfig) -> str:
    """Return how the model is cut: sums over ranks round in another order."""
    parallel = config.parallel_config
    stages = f"-pp{parallel.pipeline_parallel_size}" if parallel.pipeline_parallel_size > 1 else ""
    hosts = f"-hosts{parallel.nnodes}" if parallel.nnodes > 1 else ""
    return f"tp{parallel.tensor_parallel_size}{stages}{hosts}"


def _kv_dtype(config: VllmConfig) -> str:
    cache_dtype = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype

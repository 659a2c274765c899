"""Runs any decoder of transformers on the paged KV cache: the compatibility route.

Attention goes through `execution.attention`. On a CPU, linear layers and the input embedding use the op layer, where
bf16 weights stay bf16. All else is the code of transformers: its blocks, norms, activations and experts. Some ops of
torch round by the shape of their input, so a token's bits depend on the other tokens of its step. The numerics class of
the route therefore contains `batch-dependent`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.attention import (
    ATTENTION_NAME,
    STEP_KEYWORD,
    AttentionParams,
    AttentionStep,
    UnsupportedAttention,
    register,
)
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.execution.model import ignore
from tandem_engine.execution.probe import probe_geometry, run_largest_step
from tandem_engine.models.checkpoint import Checkpoint, Progress
from tandem_engine.models.support import check_model_class
from tandem_engine.models.vision import KEY_MAPPING
from tandem_engine.ops.base import KVPool, Ops, Step, Weight
from tandem_engine.scheduling.numerics import BATCH_DEPENDENT
from tandem_engine.settings import EngineConfig

ROUTE_NAME = f"transformers-{transformers.__version__}-{BATCH_DEPENDENT}"
"""The last part of the numerics class."""


class TransformersModel:
    """`tandem_engine.execution.model.Model` over a causal language model of transformers."""

    is_batch_invariant = False

    def __init__(self, model: Any, num_layers: int, ops: Ops) -> None:
        self._model = model
        self._last_layer = num_layers - 1
        self._ops = ops

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        """See `Model`; `kv_written` is called before the last layer's attention."""

        def when_written(layer: int) -> None:
            if layer == self._last_layer:
                kv_written()

        logits: torch.Tensor = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=sample_rows,
            **{STEP_KEYWORD: AttentionStep(self._ops, pool, step, when_written)},
        ).logits
        return logits[0]  # [1, num_sampled, vocab_size] -> [num_sampled, vocab_size]


@dataclass(frozen=True)
class LoadedTransformersModel:
    """A loaded model and what its trial forward showed."""

    model: TransformersModel
    architecture: str
    geometry: KVGeometry
    windows: Sequence[int | None]
    """One entry per layer."""


def load_transformers_model(
    checkpoint: Checkpoint,
    model_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    config: EngineConfig,
    report: Progress,
) -> LoadedTransformersModel:
    """Read the weights and run a trial forward; raises ModelUnusable if the model needs something that is not built."""
    has_own_linears = device.type == "cpu" and dtype == torch.float32
    stays_bf16 = has_own_linears and config.dtype == "auto" and _stored_dtypes(checkpoint) == {"BF16"}
    model = _read_weights(checkpoint, model_config, torch.bfloat16 if stays_bf16 else dtype).to(device)
    if has_own_linears:
        _use_own_linears(model, ops)
    report("running a trial forward", 0.6)
    geometry, attention = _run_trial(model, config, device)
    windows = [layer.window for layer in attention]
    wrapped = TransformersModel(model, geometry.num_layers, ops)
    return LoadedTransformersModel(wrapped, type(model).__name__, geometry, windows)


def _stored_dtypes(checkpoint: Checkpoint) -> set[str]:
    """Return the dtypes in the checkpoint's files by their safetensors names: "F32", "BF16"."""
    dtypes: set[str] = set()
    for path in checkpoint.weight_files:
        file: Any
        with safe_open(path, framework="np") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    return dtypes


def _read_weights(checkpoint: Checkpoint, model_config: Any, dtype: torch.dtype) -> Any:
    register()
    transformers_logging: Any = transformers.utils.logging
    transformers_logging.disable_progress_bar()  # LoadProgress events report the progress
    model_class = _model_class(model_config)
    check_model_class(model_class, model_config)
    model, loading = model_class.from_pretrained(
        checkpoint.folder,
        config=model_config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
        key_mapping=KEY_MAPPING,
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):  # transformers would serve random numbers in their place
        raise ModelUnusable(
            f"{checkpoint.folder} lacks {len(missing)} weights, {missing[0]} first; download the checkpoint anew"
        )
    return model.eval().requires_grad_(False)


def _model_class(model_config: Any) -> Any:
    mapping: Any = AutoModelForCausalLM._model_mapping
    found = mapping.get(type(model_config), None)
    if found is None:
        raise ModelUnusable(f"{model_config.model_type} is no causal language model of transformers; serve one that is")
    return found[0] if isinstance(found, tuple) else found


def _run_trial(model: Any, config: EngineConfig, device: torch.device) -> tuple[KVGeometry, list[AttentionParams]]:
    try:
        geometry, attention = probe_geometry(model, model.config.num_hidden_layers, config.block_size, device)
    except UnsupportedAttention as error:
        raise ModelUnusable(f"{error}; serve a decoder-only model with plain or sliding-window attention") from error
    if device.type == "cuda":
        run_largest_step(model, config.max_num_batched_tokens, device)
    return geometry, attention


def _use_own_linears(model: Any, ops: Ops) -> None:
    """Replace linear layers and the input embedding by ours, one at a time, and widen all other parameters to float32.

    No parameter is left in the checkpoint's mapped files: one view would keep a whole file resident.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    is_tied = is_plain and head is not None and head.weight is embedding.weight
    if is_plain and not is_tied:
        model.set_input_embeddings(_OwnEmbedding(embedding.weight.detach().clone(), ops))
    names = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    for name in names:  # names, since a list of modules would keep all their weights in memory
        module = model.get_submodule(name)
        packed = _packed(module, ops)
        if is_tied and module is head:
            model.set_input_embeddings(_OwnEmbedding(packed, ops))
        model.set_submodule(name, _OwnLinear(packed, ops))
    model.float()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _packed(module: Any, ops: Ops) -> Weight:
    matrix = module.weight.detach()
    if type(module) is Conv1D:
        matrix = matrix.t()
    if matrix.dtype not in (torch.float32, torch.bfloat16):
        matrix = matrix.float()
    return ops.pack(matrix, None if module.bias is None else module.bias.detach().float())


class _OwnLinear(nn.Module):
    """A linear layer on the op layer."""

    def __init__(self, weight: Weight, ops: Ops) -> None:
        super().__init__()
        self.weight = weight
        self._ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias for `x` [..., in_features], float32."""
        rows = self._ops.linear(x.reshape(-1, self.weight.in_features), self.weight)
        return rows.view(*x.shape[:-1], self.weight.out_features)


class _OwnEmbedding(nn.Module):
    """An input embedding that widens rows as they are read; its weight may be the head's."""

    def __init__(self, weight: torch.Tensor | Weight, ops: Ops) -> None:
        super().__init__()
        self.weight = weight  # not a parameter: `model.float` would widen all of it
        self._ops = ops

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `token_ids` [...], float32 [..., features]."""
        if isinstance(self.weight, torch.Tensor):
            return functional.embedding(token_ids, self.weight).float()
        return self._ops.rows(self.weight, token_ids.reshape(-1)).view(*token_ids.shape, -1)

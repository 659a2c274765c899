"""Loads a checkpoint into a decoder that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.lean.checkpoint_reader import CheckpointReader
from tandem_engine.models.lean.config import DecoderConfig
from tandem_engine.models.lean.decoder import Decoder
from tandem_engine.models.lean.family import Family
from tandem_engine.models.lean.packed_weights import PackedKey, PackedWeightsCache
from tandem_engine.models.lean.rotary import rotary_tables
from tandem_engine.models.lean.sources import LinearSource, NormSource, Plan
from tandem_engine.models.lean.weights import ROTARY_PREFIX, LeanWeights
from tandem_engine.ops.base import Ops, Weight
from tandem_engine.settings import DtypeChoice

_PACKED_FOLDER = "packed"

Entries = Iterator[tuple[str, Weight | torch.Tensor]]


class StorageRequest(Protocol):
    """How to store weights; `LeanRequest` documents the fields."""

    @property
    def dtype(self) -> DtypeChoice: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def state_dir(self) -> Path | None: ...
    @property
    def weights_digest(self) -> str: ...
    @property
    def is_verified(self) -> bool: ...
    @property
    def numa_node(self) -> int | None: ...


@dataclass(frozen=True)
class LeanRequest:
    """What to load, and how to store it."""

    folder: Path
    config: Any
    """The transformers configuration."""
    family: Family
    num_positions: int
    """Longest context in tokens, as `support.context_length` allows."""
    dtype: DtypeChoice = "auto"
    """The dtype of the weights in memory. auto: the checkpoint's, float16 as float32."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    state_dir: Path | None = None
    """The folder of packed weights that all workers of the host share; None: weights are private."""
    weights_digest: str = ""
    """The digest of the checkpoint's files; required with a state directory."""
    is_verified: bool = False
    """Whether packed weights are compared with their checksums before they are used."""
    numa_node: int | None = None
    """The NUMA node that has a copy of its own of the packed weights; None: the copy of all nodes."""


def load_decoder(request: LeanRequest, ops: Ops, report: Callable[[str], None]) -> Decoder:
    """Return the decoder; `report` takes a sentence for people. Raises ModelUnusable, NotLean."""
    config = request.family.decoder(request.config)
    plan = request.family.plan(request.config)
    weights = _weights(request, plan, ops, report)
    _check_sizes(config, weights, request.folder)
    return Decoder(config, weights, weights.rotary, ops)


def _weights(request: LeanRequest, plan: Plan, ops: Ops, report: Callable[[str], None]) -> LeanWeights:
    dtype = stored_dtype(request.dtype, request.config.model_type)
    reader = CheckpointReader(request.folder)
    reader.check(plan)

    def entries() -> Entries:
        yield from _rotary_entries(request)
        yield from packed_entries(plan, reader, dtype, request.device, ops)

    tables = f"rotary tables of torch {torch.__version__}, transformers {transformers.__version__}"
    names = [*plan_names(plan), f"{tables}: {request.num_positions} positions"]
    return store(request, names, entries, ops, report)


def plan_names(plan: Plan) -> list[str]:
    """Return what names the weights of a plan in the key of a packed file."""
    return [f"{name}={source}" for name, source in plan.items()]


def store(
    request: StorageRequest,
    names: Sequence[str],
    entries: Callable[[], Entries],
    ops: Ops,
    report: Callable[[str], None],
) -> LeanWeights:
    """Return the weights in the packed file that workers share, or in private memory if there can be none.

    `names` and the request identify the packed file; `entries` yields each weight once.
    """
    if request.state_dir is None:
        report("weights are private to this process: without a state directory, workers cannot share them")
        return _collect(entries())
    if request.device.type != "cpu":
        return _collect(entries())
    assert request.weights_digest, "the packed file would match any checkpoint"
    key = PackedKey(request.weights_digest, ops.name, request.dtype, tuple(names))
    try:
        packed = PackedWeightsCache(
            _packed_folder(request.state_dir, request.numa_node), is_verified=request.is_verified, report=report
        )
        return packed.get(key, ops, entries)
    except OSError as error:
        report(f"weights are private to this process: the packed file cannot be kept ({error})")
        return _collect(entries())


def _packed_folder(state_dir: Path, numa_node: int | None) -> Path:
    """Return a folder for each node that has a copy: the page cache holds one copy of a file, on one node."""
    folder = state_dir / _PACKED_FOLDER
    return folder if numa_node is None else folder / f"node{numa_node}"


def stored_dtype(choice: DtypeChoice, model_type: str) -> torch.dtype | None:
    """Return the dtype of the weights in memory; None: the checkpoint's."""
    if choice == "float16":
        raise ModelUnusable(
            f"--dtype float16, but weights of {model_type} are stored in float32 or bfloat16; take auto"
        )
    return {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[choice]


def _rotary_entries(request: LeanRequest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the rotary tables; in the shared file, only the pages of positions that occur take memory."""
    for kind, rotary in rotary_tables(request.config, request.num_positions, request.device).items():
        yield f"{ROTARY_PREFIX}{kind}.cos", rotary.cos
        yield f"{ROTARY_PREFIX}{kind}.sin", rotary.sin


def packed_entries(
    plan: Plan, reader: CheckpointReader, dtype: torch.dtype | None, device: torch.device, ops: Ops
) -> Iterator[tuple[str, Weight | torch.Tensor]]:
    """Yield each packed weight; one is in memory at a time unless the consumer keeps more."""
    for name, source in plan.items():
        if isinstance(source, LinearSource):
            matrix, bias = reader.linear(source, dtype)
            yield name, ops.pack(matrix.to(device), None if bias is None else bias.to(device))
        elif isinstance(source, NormSource):
            yield name, (reader.stack([source.name], torch.float32) + source.offset).to(device)
        else:
            yield name, reader.stack([source.name], dtype).to(device)


def _collect(entries: Iterator[tuple[str, Weight | torch.Tensor]]) -> LeanWeights:
    weights = LeanWeights()
    for name, entry in entries:
        if isinstance(entry, torch.Tensor):
            weights.tensors[name] = entry
        else:
            weights.linears[name] = entry
    return weights


def _check_sizes(config: DecoderConfig, weights: LeanWeights, folder: Path) -> None:
    """Raise ModelUnusable unless the weights have the configuration's sizes, which the kernels do not check."""
    for name, weight in weights.linears.items():
        expected = _expected_size(config, weights, name)
        if (weight.in_features, weight.out_features) != expected:
            raise ModelUnusable(
                f"{folder}: {name} has {weight.in_features} inputs and {weight.out_features} outputs, but "
                f"config.json means {expected[0]} and {expected[1]}; config.json and weights are of different models"
            )
    for name, tensor in weights.tensors.items():
        if name.startswith(ROTARY_PREFIX):
            continue
        shape = {
            "embeddings": (config.vocab_size, config.hidden_size),
            "query_norm": (config.head_dim,),
            "key_norm": (config.head_dim,),
            "query_projection_norm": (config.num_heads * config.head_dim,),
            "key_projection_norm": (config.num_kv_heads * config.head_dim,),
        }.get(name.rpartition(".")[2], (config.hidden_size,))
        if tuple(tensor.shape) != shape:
            raise ModelUnusable(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, but config.json means {shape}; "
                "config.json and weights are of different models"
            )


def _expected_size(config: DecoderConfig, weights: LeanWeights, name: str) -> tuple[int, int]:
    """Return the input and output features; an MLP's inner size is the input size of `down`."""
    prefix, _, kind = name.rpartition(".")
    heads, hidden = config.num_heads * config.head_dim, config.hidden_size
    if kind == "qkv":
        return hidden, heads + 2 * config.num_kv_heads * config.head_dim
    if kind == "output":
        return heads, hidden
    if kind == "gate_up":
        return hidden, 2 * weights.linears[f"{prefix}.down"].in_features
    if kind == "down":
        return weights.linears[name].in_features, hidden
    if kind == "router":
        experts = config.layers[int(prefix.split(".")[1])].experts
        return hidden, experts.num_experts if experts else 0
    return hidden, config.vocab_size

"""Times op layer, model and runner of a step without changing anything else.

step        | scheduler | input batch | embedding | ops, one after the other, and Python between them | sample |
execute                 |<--------------------------------------------------------------------------->|
forward                               |<----------------------------------------------------->|
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch

from tandem_engine.core import Runner, Ticket
from tandem_engine.execution.model import Model, ignore
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, MapRegion
from tandem_engine.models.lean.weights import LeanWeights
from tandem_engine.ops.base import (
    Activation,
    EncoderActivation,
    EncoderLayerParts,
    HostBatch,
    KVPool,
    LayerNorm,
    LayerParts,
    Ops,
    QKNorm,
    Rotary,
    Step,
    Weight,
)
from tandem_engine.ops.sampling import RowSample, SamplingRow
from tandem_engine.scheduling.batch import SchedulerOutput
from tandem_engine.scheduling.request import Request, Sampled

LINEARS = ("qkv", "output", "gate_up", "down", "head")
PARTS = (
    *(f"linear: {kind}" for kind in LINEARS),
    "attention",
    "rope, KV write",
    "norms",
    "gated",
    "embedding",
    "input batch",
    "sample",
    "scheduler",
    "Python between",
)
"""All parts of a step, as they are drawn."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass
class Stopwatch:
    """Seconds of each part so far. What a wrapper is given is computed inside, and nothing else counts."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    forward_began: float = 0.0
    forward_ended: float = 0.0
    execute_seconds: float = 0.0
    is_before_ops: bool = False

    def clear(self) -> None:
        """Begin anew."""
        self.seconds.clear()
        self.execute_seconds = 0.0

    def time(
        self, part: str, call: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Call, and count its time."""
        began = time.perf_counter()
        if self.is_before_ops:
            self.is_before_ops = False
            self.seconds["embedding"] += began - self.forward_began
        result = call(*args, **kwargs)
        self.seconds[part] += time.perf_counter() - began
        return result

    def parts_of(self, step_seconds: float) -> dict[str, float]:
        """Return the seconds of every part of all steps so far, which took `step_seconds` together."""
        parts = {part: self.seconds[part] for part in PARTS}
        parts["scheduler"] = step_seconds - self.execute_seconds
        parts["Python between"] = 0.0
        parts["Python between"] = step_seconds - sum(parts.values())
        return parts


class TimedOps:
    """`tandem_engine.ops.base.Ops` by delegation; linears are identified by their weights' names."""

    def __init__(self, ops: Ops, weights: LeanWeights, watch: Stopwatch) -> None:
        self._ops = ops
        self._watch = watch
        self._kinds = {id(weight): name.rpartition(".")[2] for name, weight in weights.linears.items()}

    @property
    def name(self) -> str:
        return self._ops.name

    @property
    def kv_order(self) -> str:
        return self._ops.kv_order

    @property
    def library(self) -> ctypes.CDLL | None:
        return self._ops.library

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Weight:
        return self._ops.pack(weight, bias)

    def unpack(self, weight: Weight) -> torch.Tensor:
        return self._ops.unpack(weight)

    def packed(self, in_features: int, out_features: int, tensors: dict[str, torch.Tensor]) -> Weight:
        return self._ops.packed(in_features, out_features, tensors)

    def rows(self, weight: Weight, indices: torch.Tensor) -> torch.Tensor:
        return self._watch.time("embedding", self._ops.rows, weight, indices)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        return self._watch.time(f"linear: {self._kinds[id(weight)]}", self._ops.linear, x, weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._watch.time("norms", self._ops.rms_norm, x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._watch.time("norms", self._ops.add_rms_norm, x, more, weight, eps)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._watch.time("gated", self._ops.gated, gate_up, activation)

    def step(self, batch: HostBatch) -> Step:
        return self._ops.step(batch)

    def rope_and_kv_write(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        step: Step,
        pool: KVPool,
        layer: int,
        rotary: Rotary | None,
        norm: QKNorm | None = None,
    ) -> torch.Tensor:
        call = self._ops.rope_and_kv_write
        return self._watch.time("rope, KV write", call, qkv, num_heads, step, pool, layer, rotary, norm)

    def kv_write(self, key: torch.Tensor, value: torch.Tensor, step: Step, pool: KVPool, layer: int) -> None:
        self._watch.time("rope, KV write", self._ops.kv_write, key, value, step, pool, layer)

    def paged_attention(
        self,
        query: torch.Tensor,
        num_heads: int,
        step: Step,
        pool: KVPool,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        call = self._ops.paged_attention
        return self._watch.time(
            "attention", call, query, num_heads, step, pool, layer, scale=scale, window=window, softcap=softcap
        )

    def layers(self, layers: Sequence[LayerParts]) -> None:
        """Return None: each op is called, and timed, by itself."""

    def layer_norm(self, x: torch.Tensor, norm: LayerNorm, more: torch.Tensor | None = None) -> torch.Tensor:
        return self._watch.time("norms", self._ops.layer_norm, x, norm, more)

    def activate(self, x: torch.Tensor, activation: EncoderActivation) -> torch.Tensor:
        return self._watch.time("activations", self._ops.activate, x, activation)

    def self_attention(self, qkv: torch.Tensor, num_heads: int, starts: torch.Tensor, scale: float) -> torch.Tensor:
        return self._watch.time("attention", self._ops.self_attention, qkv, num_heads, starts, scale)

    def encoder_layers(self, layers: Sequence[EncoderLayerParts]) -> None:
        """Return None: each op is called, and timed, by itself."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[RowSample]:
        """Not timed here: sampling begins where the forward ends (`SwitchedRunner`)."""
        return self._ops.sample(logits, rows)


class TimedModel:
    """A model that says when its forward began and ended."""

    def __init__(self, model: Model, watch: Stopwatch) -> None:
        self._model = model
        self._watch = watch

    @property
    def is_batch_invariant(self) -> bool:
        return self._model.is_batch_invariant

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        watch = self._watch
        watch.is_before_ops = True
        watch.forward_began = time.perf_counter()
        logits = self._model.forward(token_ids, step, pool, sample_rows, kv_written)
        watch.forward_ended = time.perf_counter()
        return logits


class SwitchedRunner:
    """Two runners over one pool, of which one is timed; `is_timed` says which one takes the next step."""

    def __init__(self, plain: Runner, timed: Runner, watch: Stopwatch) -> None:
        self.is_timed = False
        self._plain = plain
        self._timed = timed
        self._watch = watch
        self._began = 0.0

    @property
    def generations(self) -> MutableSequence[int]:
        return self._plain.generations

    def prepare(self, request: Request) -> bool:
        return self._plain.prepare(request)

    @property
    def wake_fd(self) -> int | None:
        return None

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> Ticket:
        if not self.is_timed:
            return self._plain.launch(output, kv_written)
        self._began = time.perf_counter()
        return self._timed.launch(output, kv_written)

    def collect(self, ticket: Ticket) -> Mapping[str, Sequence[Sampled]]:
        if not self.is_timed:
            return self._plain.collect(ticket)
        watch = self._watch
        sampled = self._timed.collect(ticket)
        ended = time.perf_counter()
        watch.seconds["input batch"] += watch.forward_began - self._began
        watch.seconds["sample"] += ended - watch.forward_ended
        watch.execute_seconds += ended - self._began
        return sampled

    def close(self) -> None:
        self._plain.close()

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        return self._plain.import_blocks(blocks, extents)

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        return self._plain.convert_blocks(parts, extents, layout)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._plain.checksums(blocks)

    def map_region(self, command: MapRegion, *fds: int) -> None:
        self._plain.map_region(command, *fds)

    def unmap_region(self, region_id: str) -> None:
        self._plain.unmap_region(region_id)

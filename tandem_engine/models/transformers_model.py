"""How does any decoder of transformers run on the op layer? The compatibility route.

Its attention goes through `execution.attention`; on a CPU its linear layers are ours too, so that a row's bits
do not depend on the rows beside it, and so are experts (see transformers_experts) and the blocks that we know (see
transformers_blocks). What else it computes is transformers' and torch's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import activations
from transformers.pytorch_utils import Conv1D

from tandem_engine.execution.attention import STEP_KEYWORD, AttentionStep
from tandem_engine.execution.model import ignore
from tandem_engine.models.transformers_rotary import StepTables
from tandem_engine.ops import rowwise
from tandem_engine.ops.base import Activation, KVPool, Ops, Step, Weight

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that get the same input: packed as one, each a part of it."""


class TransformersModel:
    """`tandem_engine.execution.model.Model` over a causal language model of transformers that attends through us."""

    def __init__(self, model: Any, num_layers: int, ops: Ops) -> None:
        self._model = model
        self._last_layer = num_layers - 1
        self._ops = ops
        self._tables = StepTables(ops)

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        """See `Model`; the head and the draw that follow the last layer's keys and values are not waited for."""

        def when_written(layer: int) -> None:
            if layer == self._last_layer:
                kv_written()

        turned = self._tables.of_step()
        attention = AttentionStep(self._ops, pool, step, when_written, turned=turned, sample_rows=sample_rows)
        logits: torch.Tensor = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=sample_rows,
            **{STEP_KEYWORD: attention},
        ).logits
        return logits[0]  # [1, num_sampled, vocab_size]


def use_own_linears(model: Any, ops: Ops) -> None:
    """Put the op layer's linear in the place of torch's, one layer after the other, and an embedding tied to one.

    Weights stay in the dtype they are in, a plain embedding too; all other parameters become float32, which the
    arithmetic is in. Nothing of the model lies in the checkpoint's mapped files any more.
    """
    tied = _tied_embedding(model)
    _use_own_siblings(model, ops)
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear or type(module) is Conv1D]
    for name in names:  # by name: whoever keeps the modules keeps their weights, too
        module = model.get_submodule(name)
        is_tied = tied and module.weight is model.get_submodule(tied).weight
        weight = _packed(module, ops)
        if is_tied:
            _replace(model, tied, _OwnEmbedding(weight, ops))
        _replace(model, name, OwnLinear(weight, ops))
    _spread_gates(model)
    _keep_embedding(model)
    model.float()
    for parameter in model.parameters():  # one view of a mapped file would keep all of the file resident
        parameter.data = parameter.data.clone()


def use_own_activations(model: Any) -> bool:
    """Put row-wise activations in the place of torch's fused ones, and say whether all others are row-wise, too."""
    for name, module in list(model.named_modules()):
        if (own := _OWN_ACTIVATIONS.get(type(module))) is not None:
            _replace(model, name, OwnActivation(*own))
    kinds = {type(module) for module in model.modules()}
    return all(kind in _ROWWISE for kind in kinds if kind.__module__ in _ACTIVATION_MODULES)


def _use_own_siblings(model: Any, ops: Ops) -> None:
    for parent in list(model.modules()):
        for names in _SIBLINGS:
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if not _are_alike(linears):
                continue
            sizes = [linear.out_features for linear in linears]
            whole = _packed_as_one(linears, ops)
            if (parts := ops.parts(whole, sizes)) is None:
                continue
            for name, part in zip(names, parts, strict=True):
                setattr(parent, name, OwnLinear(part, ops, whole))


def _are_alike(linears: Sequence[Any]) -> bool:
    """Return whether these are plain linear layers that can lie in one matrix."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    return len({(linear.in_features, linear.weight.dtype) for linear in linears}) == 1


def _packed_as_one(linears: Sequence[Any], ops: Ops) -> Weight:
    matrix = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return ops.pack(_stored(matrix))
    biases = [matrix.new_zeros(len(each.weight)) if each.bias is None else each.bias.detach() for each in linears]
    return ops.pack(_stored(matrix), torch.cat([bias.float() for bias in biases]))


def _packed(module: Any, ops: Ops) -> Weight:
    matrix = module.weight.detach().t() if type(module) is Conv1D else module.weight.detach()
    return ops.pack(_stored(matrix), None if module.bias is None else module.bias.detach().float())


def _stored(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.dtype in (torch.float32, torch.bfloat16) else matrix.float()


def _tied_embedding(model: Any) -> str:
    """Return the input embedding's name, if it is a plain one whose weights are the head's; else ""."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or type(embedding) is not nn.Embedding or head.weight is not embedding.weight:
        return ""
    name: str = next(name for name, module in model.named_modules() if module is embedding)
    return name


def _keep_embedding(model: Any) -> None:
    """Let a plain input embedding of its own stay in bf16: its rows are widened as they are read."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if is_plain and embedding.weight.dtype == torch.bfloat16 and getattr(head, "weight", None) is not embedding.weight:
        name = next(name for name, module in model.named_modules() if module is embedding)
        _replace(model, name, _StoredEmbedding(embedding.weight.detach().clone()))


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _spread_gates(model: Any) -> None:
    for module in model.modules():
        gate = getattr(module, "shared_expert_gate", None)
        if type(gate) is OwnLinear and gate.out_features == 1:
            module.shared_expert_gate = _SpreadGate(gate)


class _SpreadGate(nn.Module):
    """A gate of one number per token, whose numbers lie apart: torch computes their sigmoids one by one then.

    Side by side it takes several at once, and rounds the last ones of a row otherwise.
    """

    def __init__(self, gate: OwnLinear) -> None:
        super().__init__()
        self._gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._gate(x)
        apart: torch.Tensor = rows.new_empty(*rows.shape[:-1], 2)[..., :1].copy_(rows)
        return apart


class OwnActivation(nn.Module):
    """An activation whose rows depend on themselves alone; `name` is the op layer's."""

    def __init__(self, name: Activation, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.name: Activation = name
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


_OWN_ACTIVATIONS: dict[type[nn.Module], tuple[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    nn.SiLU: ("silu", rowwise.silu),
    activations.SiLUActivation: ("silu", rowwise.silu),
    activations.GELUTanh: ("gelu_tanh", rowwise.gelu_tanh),
}
_ROWWISE = {nn.ReLU, activations.ReLUSquaredActivation}
_ACTIVATION_MODULES = {nn.SiLU.__module__, activations.__name__}
"""Where torch's and transformers' are defined."""


class OwnLinear(nn.Module):
    """A linear layer by the op layer; `whole` is the weight that its own is a part of, if it is."""

    def __init__(self, weight: Weight, ops: Ops, whole: Weight | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.own = weight
        self.whole = whole
        self._ops = ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias for `x` [..., in_features], float32."""
        rows = self._ops.linear(x.reshape(-1, self.in_features), self.own)
        return rows.view(*x.shape[:-1], self.out_features)


class _OwnEmbedding(nn.Module):
    def __init__(self, weight: Weight, ops: Ops) -> None:
        super().__init__()
        self._own = weight
        self._ops = ops

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `token_ids` [...], float32 [..., features]."""
        return self._ops.rows(self._own, token_ids.reshape(-1)).view(*token_ids.shape, -1)


class _StoredEmbedding(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._own = weight  # no parameter: `float` would widen it

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `token_ids` [...], float32 [..., features]."""
        return functional.embedding(token_ids, self._own).float()

"""Which blocks of transformers' models run on the op layer as a whole: norms, gated MLPs, attention?

Those whose code we know (see known_code): there one op takes the place of a handful of torch's, which compute on one
thread. All others run as they are, on our linear layers. A block's `forward` is replaced, nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem_engine.execution.attention import Asked
from tandem_engine.models.known_code import digest_of, digest_of_method
from tandem_engine.models.transformers_layers import OwnAttention, OwnBlocks, OwnMLP, run_layers_at_once
from tandem_engine.models.transformers_model import OwnActivation, OwnLinear
from tandem_engine.ops.base import HeadNorm, Ops, Weight

_NORMS = {
    ("9f550f6c807cedec", ""): ("variance_epsilon", 0.0),  # Llama and most others
    ("5768fad469f0a116", ""): ("variance_epsilon", 0.0),  # Olmo2
    ("31ab92ebb6c8a6bf", "0dbf55b9023daa30"): ("eps", 1.0),  # Gemma to Gemma 3
}
"""Digests of `forward` and `_norm` of RMS norms: what they call epsilon, and what they add to the weight."""

_MLPS = {
    "565dacd32e491c89": ("gate_proj", "up_proj", "act_fn"),  # Llama and most others
    "11a4281606c7b2ce": ("gate_up_proj", "gate_up_proj", "activation_fn"),  # Phi-3, GLM-4
}
"""Digests of `forward`: the names of gate, up and activation; the way down is `down_proj`."""

_ATTENTIONS = {
    "d5f879a06ce2ca74",  # Llama, Gemma, Granite, Arcee, Helium, Qwen2-MoE
    "3e158fd579fa4ab5",  # Mistral, Mixtral
    "9f3fa126bcc72e4d",  # Qwen2, Ministral
    "beda35cba945cca5",  # Gemma 2
    "1c98cc50abdf782d",  # Seed-OSS
    "9aa83791a956d77a",  # Starcoder2
    "d91dd24e7b1fbbf8",  # SmolLM3: some layers turn nothing
    "4ccf8fc21407ba24",  # Qwen3, with norms of heads
    "db7fbf693eeb3d05",  # Gemma 3, with norms of heads
}
_HEAD_NORMED = {"4ccf8fc21407ba24", "db7fbf693eeb3d05"}
_SOME_TURN = {"d91dd24e7b1fbbf8"}
"""Digests of `forward`: q_proj, k_proj, v_proj; rotary embeddings by halves; attention; o_proj."""

_ROTATIONS = {"d202c0cc28cf8935", "e9a33870d0fa478b"}
"""Digests of `apply_rotary_pos_emb`: x * cos + rotate_half(x) * sin."""
_HALVES = {"2f159d1732fe36ec"}
"""Digests of `rotate_half`."""


def use_own_blocks(model: Any, asked: Sequence[Asked], ops: Ops) -> str:
    """Let blocks that are known compute on the op layer, and say how many do, as part of the numerics' name.

    `asked` is what each layer's attention asked for when it was tried out.
    """
    norms = {module: norm for module in model.modules() if (norm := _norm_of(module)) is not None}
    mlps = {module: mlp for module in model.modules() if (mlp := _own_mlp(module, ops)) is not None}
    attentions = {
        module: attention
        for module in model.modules()
        if (attention := _own_attention(module, asked, norms, ops)) is not None
    }
    for module, (weight, eps) in norms.items():
        module.forward = _own_norm(module.forward, weight, eps, ops)
    for module, mlp in mlps.items():
        module.forward = mlp.forward
    for module, attention in attentions.items():
        module.forward = attention.forward
    run_layers_at_once(model, OwnBlocks(norms, mlps, attentions), ops)
    return f"+{len(norms)}norms+{len(mlps)}mlps+{len(attentions)}attentions"


def _norm_of(module: Any) -> tuple[torch.Tensor, float] | None:
    """Return the weight, anything added, and the epsilon of an RMS norm; None: it is something else."""
    known = _NORMS.get((digest_of_method(module, "forward"), digest_of_method(module, "_norm")))
    if known is None or dict(module.named_parameters()).keys() != {"weight"} or module.weight.ndim != 1:
        return None
    name, added = known
    weight = module.weight.detach()
    return (weight + added if added else weight), float(getattr(module, name))


def _own_norm(
    original: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, eps: float, ops: Ops
) -> Callable[[torch.Tensor], torch.Tensor]:
    features = len(weight)

    def norm(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return original(x)
        return ops.rms_norm(x.reshape(-1, features), weight, eps).view(x.shape)

    return norm


def _own_mlp(module: Any, ops: Ops) -> OwnMLP | None:
    names = _MLPS.get(digest_of_method(module, "forward"))
    if names is None:
        return None
    gate, up, activation = (getattr(module, name) for name in names)
    gate_up = gate.own if gate is up and type(gate) is OwnLinear else _whole(gate, up)
    if gate_up is None or type(activation) is not OwnActivation or type(module.down_proj) is not OwnLinear:
        return None
    return OwnMLP(gate_up, module.down_proj.own, activation.name, ops)


def _whole(*linears: Any) -> Weight | None:
    """Return the weight that these are the parts of, in this order; None: there is none."""
    if any(type(linear) is not OwnLinear for linear in linears):
        return None
    whole: Weight | None = linears[0].whole
    is_theirs = whole is not None and all(linear.whole is whole for linear in linears)
    return whole if is_theirs else None


def _own_attention(
    module: Any, asked: Sequence[Asked], norms: dict[Any, tuple[torch.Tensor, float]], ops: Ops
) -> OwnAttention | None:
    digest = digest_of_method(module, "forward")
    if digest not in _ATTENTIONS or not _turns_by_halves(type(module).forward):
        return None
    qkv = _whole(module.q_proj, module.k_proj, module.v_proj)
    if qkv is None or type(module.o_proj) is not OwnLinear:
        return None
    norm = None
    if digest in _HEAD_NORMED:
        query, key = norms.get(module.q_norm), norms.get(module.k_norm)
        if query is None or key is None or query[1] != key[1]:
            return None
        norm = HeadNorm(query[0], key[0], query[1])
    turns = bool(module.use_rope) if digest in _SOME_TURN else True
    num_heads = module.q_proj.out_features // module.head_dim
    return OwnAttention(module.forward, qkv, module.o_proj.own, num_heads, asked[module.layer_idx], norm, turns, ops)


def _turns_by_halves(forward: Any) -> bool:
    turn = forward.__globals__.get("apply_rotary_pos_emb")
    if turn is None or digest_of(turn) not in _ROTATIONS:
        return False
    return digest_of(turn.__globals__["rotate_half"]) in _HALVES

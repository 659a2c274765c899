"""The model in training: a small Llama whose weights have the names of transformers."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.batches import IGNORED_TARGET, Batch

_LONGEST_MASKED_ROW = 512
"""Up to here documents that share a row do not see one another; in longer rows the model learns to look past them."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the model."""

    vocabulary_size: int = 3072
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 768
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_heads

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a JSON file."""
        return asdict(self)


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE with the halves of a head as pairs, as transformers' Llama does. x: [B, L, heads, D]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _Projections(nn.Module):
    """A group of weight matrices without bias, each kept under its own name."""

    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (num_outputs, num_inputs) in sizes.items():
            self.add_module(name, nn.Linear(num_inputs, num_outputs, bias=False))

    def weight(self, dtype: torch.dtype, *names: str) -> Tensor:
        """Return the stacked matrices, so that one product computes all of them."""
        matrices = [self.get_submodule(name).weight for name in names]
        return torch.cat([matrix.to(dtype) for matrix in matrices if isinstance(matrix, Tensor)])


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Layer(nn.Module):
    """One decoder layer. Products run in `dtype`, the residual stream and the norms in fp32."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.shape = shape
        self.input_layernorm = _Norm(hidden)
        self.self_attn = _Projections(
            q_proj=(queries, hidden), k_proj=(keys, hidden), v_proj=(keys, hidden), o_proj=(hidden, queries)
        )
        self.post_attention_layernorm = _Norm(hidden)
        self.mlp = _Projections(
            gate_proj=(shape.intermediate_size, hidden),
            up_proj=(shape.intermediate_size, hidden),
            down_proj=(hidden, shape.intermediate_size),
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x: [B, L, hidden], fp32."""
        shape = self.shape
        h = _normalised(x, self.input_layernorm.weight, shape.norm_epsilon).to(dtype)
        projected = F.linear(h, self.self_attn.weight(dtype, "q_proj", "k_proj", "v_proj"))
        heads = projected.view(*projected.shape[:-1], -1, shape.head_dim)  # [B, L, q + 2 kv heads, D]
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated = _rotated(heads[:, :, :num_rotated], *rope).to(dtype)
        q = rotated[:, :, : shape.num_heads].transpose(1, 2)  # [B, heads, L, D]
        k = rotated[:, :, shape.num_heads :].transpose(1, 2)
        v = heads[:, :, num_rotated:].transpose(1, 2)
        attended = _attend(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + F.linear(attended, self.self_attn.weight(dtype, "o_proj"))
        h = _normalised(x, self.post_attention_layernorm.weight, shape.norm_epsilon).to(dtype)
        gate, up = F.linear(h, self.mlp.weight(dtype, "gate_proj", "up_proj")).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.mlp.weight(dtype, "down_proj"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with grouped queries. q: [B, heads, L, D]; k, v: [B, kv heads, L, D]; mask: [B, 1, L, L] to add.

    Always in fp32: on one Zen 4 core forward and backward of 16 rows of 256 tokens take 60 ms, in bf16 106 ms, as
    plain matrix products 209 ms.
    """
    out = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.to(q.dtype)


class _Backbone(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _Norm(shape.hidden_size)


class DemoModel(nn.Module):
    """The model in training; its `state_dict` is a transformers Llama's, without tied embeddings."""

    def __init__(self, shape: ModelShape, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.model = _Backbone(shape)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        into_residual = (2 * self.shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, 0.02 * scale, generator=generator)

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self.shape.rope_theta**-exponents
        return angles.cos()[:, None], angles.sin()[:, None]  # [L, 1, D / 2]

    def hidden_states(self, token_ids: Tensor, documents: Tensor) -> Tensor:
        """Return [num_rows * num_tokens, hidden], normalised, fp32."""
        x = self.model.embed_tokens(token_ids)
        length = token_ids.shape[1]
        rope = self._rope(length)
        mask = _document_mask(documents) if length <= _LONGEST_MASKED_ROW else None
        for layer in self.model.layers:
            x = layer(x, rope, mask, self.dtype)
        return _normalised(x, self.model.norm.weight, self.shape.norm_epsilon).flatten(0, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss over the trained tokens of a batch. Logits are computed for these tokens alone."""
        states = self.hidden_states(batch.token_ids, batch.documents)[batch.positions]
        logits = F.linear(states.to(self.dtype), self.model.embed_tokens.weight.to(self.dtype))
        return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED_TARGET)


def _document_mask(documents: Tensor) -> Tensor:
    """Return what to add to scores so that a token sees only earlier tokens of its own document: [B, 1, L, L]."""
    length = documents.shape[1]
    visible = (documents[:, :, None] == documents[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None]

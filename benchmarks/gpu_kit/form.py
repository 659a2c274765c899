"""Defines how large each part of the kit is: in full, quickly, and in small for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lib import random_model


@dataclass(frozen=True)
class Form:
    """Sizes of all parts."""

    shape: str
    """Of the random Llama, a key of `benchmarks.lib.random_model.SHAPES`."""
    copy_mib: int
    """Bytes that the bandwidths are measured with."""
    matmul_size: int
    """Rows and columns of the square matrices."""
    num_launches: int
    parity_tokens: int
    """Tokens of an answer that is compared with the CPU's."""
    parity_prompts: int
    """Prompts of the random Llama; the built-in model has its own."""
    prompt_tokens: int
    answer_tokens: int
    batches: tuple[int, ...]
    sampling_batch: int
    sampling_tokens: int
    prefill_tokens: int
    num_turns: int
    """Times that ours and the other side are measured, by turns."""
    max_batched_tokens: int
    """Token budget of one step, for both sides."""
    served_prompt_tokens: int
    served_answer_tokens: int
    num_requests: int
    """Requests to a whole Tandem, per part."""
    pool_bytes: int | None
    """KV pool of each worker; None: its share of the card."""

    @property
    def served_prompt_bytes(self) -> int:
        """Bytes of keys and values of a prompt: of bfloat16 on a card, of float32 on a CPU."""
        shape = random_model.SHAPES[self.shape]
        numbers = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
        return int(self.served_prompt_tokens * numbers * (4 if self.pool_bytes is not None else 2))


FULL = Form(
    shape="1b",
    copy_mib=1024,
    matmul_size=8192,
    num_launches=2000,
    parity_tokens=32,
    parity_prompts=8,
    prompt_tokens=128,
    answer_tokens=96,
    batches=(1, 32),
    sampling_batch=64,
    sampling_tokens=32,
    prefill_tokens=2048,
    num_turns=4,
    max_batched_tokens=2048,
    served_prompt_tokens=1024,
    served_answer_tokens=32,
    num_requests=12,
    pool_bytes=None,
)
QUICK = Form(
    shape="0.1b",
    copy_mib=256,
    matmul_size=4096,
    num_launches=500,
    parity_tokens=16,
    parity_prompts=4,
    prompt_tokens=64,
    answer_tokens=32,
    batches=(1, 32),
    sampling_batch=64,
    sampling_tokens=16,
    prefill_tokens=512,
    num_turns=2,
    max_batched_tokens=2048,
    served_prompt_tokens=512,
    served_answer_tokens=16,
    num_requests=6,
    pool_bytes=None,
)
ON_CPU = Form(
    shape="tiny",
    copy_mib=16,
    matmul_size=256,
    num_launches=100,
    parity_tokens=8,
    parity_prompts=2,
    prompt_tokens=16,
    answer_tokens=16,
    batches=(1, 4),
    sampling_batch=4,
    sampling_tokens=12,
    prefill_tokens=64,
    num_turns=2,
    max_batched_tokens=256,
    served_prompt_tokens=64,
    served_answer_tokens=6,
    num_requests=4,
    pool_bytes=32 << 20,
)
FORMS = {"full": FULL, "quick": QUICK, "cpu": ON_CPU}

"""Defines the scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT_TOKENS = 32


@dataclass(frozen=True)
class SchedulerConfig:
    """Holds settings of the operator and facts found at load; nothing here changes afterwards.

    Raises ValueError that names the field, its value and its limit.
    """

    num_blocks: int
    block_size: int
    """Tokens per KV block."""
    context_length: int
    """Tokens of prompt and answer, without the answer's last token, which needs no KV slot."""
    vocab_size: int
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_prefill_tokens_with_decodes: int = 64
    """Prompt tokens in a step that also has decodes; a step without decodes has the whole budget for prompts."""
    max_prefill_context_with_decodes: int = 1 << 20
    """The same tokens, each times the length of its context: behind a long context, chunks are smaller."""
    max_num_seqs: int = 64
    """Requests in one step."""
    max_num_waiting: int = 256
    """Requests in the queue before the next is refused."""
    max_draft_tokens: int = 0
    """Draft tokens of one answer in one step, at most; 0: none."""
    window: int | None = None
    """Largest window of all layers in tokens, the attending token included; None: some layer attends to all."""
    num_window_groups: int | None = None
    """Groups of layers with a window that have block tables of their own; None: all layers share one table."""
    group_window: int | None = None
    """Window of those groups in tokens."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "max_draft_tokens" and value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if not 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens}, must be from 0 to {MAX_DRAFT_TOKENS}")

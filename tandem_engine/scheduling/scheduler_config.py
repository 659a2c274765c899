"""What bounds the scheduler?"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT_TOKENS = 32


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of the operator and facts found at load, in one value; nothing here changes afterwards.

    Raises ValueError that names the field, its value and its limit.
    """

    num_blocks: int
    block_size: int
    """Tokens per KV block."""
    context_length: int
    """Tokens of prompt and answer, without the answer's last: that one takes no KV slot."""
    vocab_size: int
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_num_seqs: int = 64
    """Requests in one step."""
    max_num_waiting: int = 256
    """Requests in the queue before the next is refused."""
    itl_target_ms: float = 0.0
    """Prompt chunks are cut so that a step with answers in it takes no longer, if the chunk can help it; 0: not cut."""
    max_draft_tokens: int = 0
    """Tokens guessed ahead of one answer in one step; 0: none."""
    window: int | None = None
    """No layer attends to more than so many tokens, the attending one counted; None: a layer attends to all."""
    num_window_groups: int | None = None
    """Groups of layers with a window that have block tables of their own, beside the others'; None: one for all."""
    group_window: int | None = None
    """Tokens that the layers of those groups attend to at most."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("itl_target_ms", "max_draft_tokens") and value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if not self.itl_target_ms >= 0:
            raise ValueError(f"itl_target_ms is {self.itl_target_ms}, must be at least 0")
        if not 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens}, must be from 0 to {MAX_DRAFT_TOKENS}")

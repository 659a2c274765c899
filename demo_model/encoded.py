"""Holds encoded documents: token ids, which of them are trained, and the ids of control tokens."""

from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
SPECIAL_TOKEN_IDS = (0, 1, 2)


@dataclass(frozen=True)
class Encoded:
    """A document's token ids, and for each whether the model is trained to predict it."""

    token_ids: list[int]
    is_trained: list[bool]

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, num_tokens: int) -> "Encoded":
        """Return the first `num_tokens` tokens."""
        return Encoded(self.token_ids[:num_tokens], self.is_trained[:num_tokens])

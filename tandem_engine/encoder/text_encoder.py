"""Runs the inputs of one step through a stack and a head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem_engine.encoder.batch import EncoderInput, Values
from tandem_engine.encoder.heads import Head
from tandem_engine.encoder.messages import EncoderInfo
from tandem_engine.encoder.stack import EncoderStack


class TextEncoder:
    """`tandem_engine.encoder.batch.Encoder` of BERT's kind."""

    def __init__(self, stack: EncoderStack, head: Head, context_length: int, device: torch.device) -> None:
        self.context_length = context_length
        self._stack = stack
        self._head = head
        self._device = device

    @property
    def info(self) -> EncoderInfo:
        return self._head.info

    @property
    def vocab_size(self) -> int:
        return self._stack.config.vocab_size

    @torch.inference_mode()
    def encode(self, inputs: Sequence[EncoderInput]) -> Values:
        token_ids = np.concatenate([each.token_ids for each in inputs]).astype(np.int64)
        positions = np.concatenate([np.arange(each.num_tokens) for each in inputs])
        types = np.concatenate([self._types_of(each) for each in inputs])
        starts = starts_of(inputs)
        ids, kinds, places = (torch.from_numpy(each).to(self._device) for each in (token_ids, types, positions))
        hidden = self._stack.forward(ids, kinds, places, starts)
        values: Values = self._head.forward(hidden, starts, [each.pooling for each in inputs]).cpu().numpy()
        return values

    def _types_of(self, text: EncoderInput) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return 0 for the first text's tokens and 1 for the second's, where the model has two types."""
        types = np.zeros(text.num_tokens, np.int64)
        if text.num_first_tokens and self._stack.config.num_token_types > 1:
            types[text.num_first_tokens :] = 1
        return types


def starts_of(inputs: Sequence[EncoderInput]) -> torch.Tensor:
    """Return where each input starts, and the end of the last: [len(inputs) + 1], int64."""
    return torch.tensor([0, *np.cumsum([each.num_tokens for each in inputs])], dtype=torch.int64)

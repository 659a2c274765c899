"""Checks the inputs of a call before they are queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem_engine.encoder.batch import Encoder, EncoderInput
from tandem_engine.encoder.messages import EncodeTexts, Pooling, TextInput

_BYTES_PER_TOKEN = 4


class InvalidText(ValueError):
    """A call cannot be done; the message names the input, the value, the limit and the remedy."""


def checked_inputs(command: EncodeTexts, encoder: Encoder) -> Sequence[EncoderInput]:
    """Return the inputs of a call; raises InvalidText."""
    info = encoder.info
    if not command.inputs:
        raise InvalidText("the call has no inputs; send one or more")
    if command.pooling and info.task != "text-embedding":
        raise InvalidText(f"pooling is {command.pooling!r}, but this model's task is {info.task}; leave pooling out")
    pooling = command.pooling or None
    return [_checked(index, text, pooling, encoder) for index, text in enumerate(command.inputs)]


def _checked(index: int, text: TextInput, pooling: Pooling | None, encoder: Encoder) -> EncoderInput:
    if len(text.token_ids) % _BYTES_PER_TOKEN:
        raise InvalidText(f"input {index} has {len(text.token_ids)} bytes of token ids, which are 4 bytes each")
    token_ids = np.frombuffer(text.token_ids, "<u4")
    if not len(token_ids):
        raise InvalidText(f"input {index} has no tokens; send at least one")
    if len(token_ids) > encoder.context_length:
        raise InvalidText(
            f"input {index} has {len(token_ids):,} tokens, this model takes {encoder.context_length:,}; "
            "shorten the text"
        )
    if (largest := int(token_ids.max())) >= encoder.vocab_size:
        raise InvalidText(
            f"input {index} has the token id {largest}, this model has {encoder.vocab_size} tokens; use its tokenizer"
        )
    _check_pair(index, text.num_first_tokens, len(token_ids), encoder)
    return EncoderInput(token_ids, text.num_first_tokens, pooling)


def _check_pair(index: int, num_first: int, num_tokens: int, encoder: Encoder) -> None:
    if num_first and not encoder.info.has_pairs:
        raise InvalidText(f"input {index} is a pair of texts, but this model reads one text at a time; send one")
    if not 0 <= num_first < num_tokens:
        raise InvalidText(
            f"input {index} gives its first text {num_first} of {num_tokens} tokens; give it from 1 to "
            f"{num_tokens - 1}, or 0 for one text"
        )

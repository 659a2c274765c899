"""What the bodies for encoders share."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.generation import EncoderInput, ModelFacts
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import ContextTooLong, InvalidRequest

HARMLESS = frozenset({"user", "metadata", "safety_identifier"})
"""Fields that clients send by habit, and that do not change the answer."""


def check_lengths(inputs: Sequence[EncoderInput], model: ModelFacts, field: str) -> None:
    """Raise ContextTooLong naming the first input that the model cannot read."""
    for index, each in enumerate(inputs):
        if each.num_tokens > model.context_length:
            raise ContextTooLong(
                f"{field}[{index}] has {each.num_tokens:,} tokens, {model.model_id} reads {model.context_length:,}; "
                "shorten or split the text",
                field=field,
            )


def check_not_empty(texts: Sequence[str], field: str) -> None:
    """Raise InvalidRequest naming the first text that is empty."""
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{field}[{index}] is empty; leave the entry out", field=field)


def encoded_pairs(
    query: str, documents: Sequence[str], model: ModelFacts, tokenizer: TextTokenizer, *, max_tokens: int | None
) -> tuple[EncoderInput, ...]:
    """Return each document with the query, cut to `max_tokens` in all if that is given. Raise InvalidRequest."""
    if model.encoder is None or not model.encoder.has_pairs:
        raise InvalidRequest(f"{model.model_id} does not read pairs of texts; name a ranking model", field="model")
    return tuple(
        tokenizer.encode_texts(query, document, max_tokens=max_tokens, field="documents") for document in documents
    )

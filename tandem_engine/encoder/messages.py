"""Defines the messages between the engine process of an encode worker and the worker's front.

They travel as those of `tandem_engine.messages` do; LoadProgress, Ping, Pong, Shutdown and EngineFailed are shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from tandem_engine.messages import Message, ModelInfo

EncoderTask = Literal["text-embedding", "text-classification", "text-ranking"]
Pooling = Literal["mean", "cls", "last"]


class TextInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One text, or a pair of texts, as the model reads it."""

    token_ids: bytes
    """uint32, little-endian; the model's special tokens included."""
    num_first_tokens: int = 0
    """Of a pair: tokens of the first text and its special tokens; 0: one text."""


class HasTokens(Protocol):
    """A text in one of the messages that an encode call passes through."""

    @property
    def token_ids(self) -> bytes: ...


def num_tokens_in(inputs: Iterable[HasTokens]) -> int:
    """Return the tokens of a call's texts, as front and engine count them: their sums are compared."""
    return sum(len(each.token_ids) for each in inputs) // 4


class EncoderInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an encoder makes of one input."""

    task: EncoderTask
    num_values: int
    """Dimensions of an embedding, classes of a classifier, 1 for a ranking."""
    labels: list[str]
    """Of the classes, in the order of the values."""
    pooling: str
    """Of embeddings: a `Pooling`; "" for other tasks."""
    is_normalized: bool
    """An embedding has the length 1."""
    has_pairs: bool
    """An input may have two texts."""


# ------------------------------------------------------------------------------------------------- commands


class EncodeTexts(Message, frozen=True):
    """Encode some inputs. TextsEncoded or TextsRefused answers, unless CancelTexts comes first."""

    key: int
    """Of the front; unique in the life of the process."""
    inputs: list[TextInput]
    pooling: Pooling | Literal[""] = ""
    """Of embeddings; "": the model's."""
    fairness_key: str = ""
    """Calls of different keys take turns."""

    @property
    def num_tokens(self) -> int:
        return num_tokens_in(self.inputs)


class CancelTexts(Message, frozen=True):
    """Drop what is left of a call. Unknown keys are ignored."""

    key: int


# --------------------------------------------------------------------------------------------------- events


class EncoderReady(Message, frozen=True):
    model: ModelInfo
    encoder: EncoderInfo
    numa_node: int | None = None
    """The NUMA node that weights are taken from; None: no node is preferred."""


class TextsEncoded(Message, frozen=True):
    key: int
    values: bytes
    """float32, little-endian: [inputs, num_values]."""
    num_tokens: int
    scheduled_ns: int
    """The step of the first input began; Unix nanoseconds."""
    finished_ns: int


class TextsRefused(Message, frozen=True):
    key: int
    message: str
    reason: Literal["invalid", "full", "failed"]
    """invalid: this call cannot be done. full: the queue is; later it may. failed: the engine's fault."""


class EncoderStats(Message, frozen=True):
    """Sent after each step."""

    num_running: int
    """Calls with an input in the last step."""
    num_waiting: int
    """Calls without one so far."""
    num_tokens_in_flight: int
    """Tokens of all inputs that are not encoded yet."""
    counters: dict[str, float]
    """Totals since start."""
    num_tokens_received: int
    """Tokens of all EncodeTexts so far, refused ones too: of those after them, the stats tell nothing."""


EncoderCommand = EncodeTexts | CancelTexts
EncoderEvent = EncoderReady | TextsEncoded | TextsRefused | EncoderStats

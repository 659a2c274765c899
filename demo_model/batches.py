"""Makes the training batches: batch number n of a seed, rows of one length filled with whole documents."""

from dataclasses import dataclass
from itertools import islice
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demo_model.chat_format import ChatEncoder
from demo_model.corpus import documents
from demo_model.drills import drill_share
from demo_model.encoded import Encoded

_DOCUMENTS_PER_BATCH = 1 << 16
"""Batch n reads documents n * this and on, so that no batch depends on how far an earlier one read."""


IGNORED_TARGET = -100
_TARGETS_MULTIPLE_OF = 256
"""oneDNN keeps a program for every shape it meets: few different numbers of targets keep the process small."""


@dataclass(frozen=True)
class BatchShape:
    """The rows and tokens of a batch, and the share of batches with this shape."""

    num_rows: int
    num_tokens: int
    share: float

    @property
    def is_long(self) -> bool:
        """Return whether rows are long enough for chats of many exchanges."""
        return self.num_tokens >= 512


def shapes(tokens_per_batch: int) -> tuple[BatchShape, ...]:
    """Return the batch shapes: mostly short rows, some of the whole context length.

    Short rows leave out longer documents, and every second tool call is longer than 160 tokens.
    """
    shares = {160: 0.35, 384: 0.50, 512: 0.08, 2048: 0.07}
    return tuple(
        BatchShape(max(1, tokens_per_batch // num_tokens), num_tokens, share) for num_tokens, share in shares.items()
    )


@dataclass(frozen=True)
class Batch:
    """Rows of token ids; `documents` numbers the document of each token within its row, -1 for padding."""

    token_ids: Tensor  # [num_rows, num_tokens], int64
    documents: Tensor  # [num_rows, num_tokens], int64
    positions: Tensor  # [num_targets], places of trained predictions in the flattened rows
    targets: Tensor  # [num_targets], the token to predict there, or IGNORED_TARGET for padding


def _batch_random(seed: int, index: int) -> Random:
    return Random(f"batch {seed} {index}")


class BatchStream:
    """Makes batch `index` from the seed and the index alone, so that a resumed run needs no state but a number."""

    def __init__(self, encoder: ChatEncoder, seed: int, tokens_per_batch: int) -> None:
        self._encoder = encoder
        self._seed = seed
        self._shapes = shapes(tokens_per_batch)

    def batch(self, index: int) -> Batch:
        """Make one batch."""
        random = _batch_random(self._seed, index)
        shape = random.choices(self._shapes, [shape.share for shape in self._shapes])[0]
        rows = self._rows(shape, index * _DOCUMENTS_PER_BATCH, drill_share(index))
        return _as_batch(rows, shape.num_tokens)

    def _rows(self, shape: BatchShape, first_document: int, share: float) -> list[list[Encoded]]:
        """Fill the rows with documents, the longest first, each into the first row that has room."""
        wanted = shape.num_rows * shape.num_tokens
        pool: list[Encoded] = []
        num_pooled = 0
        random = Random(f"drills {self._seed} {first_document}")
        for document in islice(documents(self._seed, first_document, long=shape.is_long), _DOCUMENTS_PER_BATCH):
            encoded = self._encoder.drill(random) if random.random() < share else self._encoder.encode(document)
            if len(encoded) > shape.num_tokens and not shape.is_long:
                continue
            pool.append(encoded.cut(shape.num_tokens))
            num_pooled += len(pool[-1])
            if num_pooled >= wanted:
                break
        return _packed(pool, shape)


def _packed(pool: list[Encoded], shape: BatchShape) -> list[list[Encoded]]:
    rows: list[list[Encoded]] = [[] for _ in range(shape.num_rows)]
    room = [shape.num_tokens] * shape.num_rows
    for encoded in sorted(pool, key=len, reverse=True):
        row = next((row for row in range(shape.num_rows) if room[row] >= len(encoded)), None)
        if row is not None:
            rows[row].append(encoded)
            room[row] -= len(encoded)
    return rows


def _as_batch(rows: list[list[Encoded]], num_tokens: int) -> Batch:
    token_ids: npt.NDArray[np.int64] = np.zeros((len(rows), num_tokens), np.int64)
    owners: npt.NDArray[np.int64] = np.full((len(rows), num_tokens), -1, np.int64)
    trained: npt.NDArray[np.bool_] = np.zeros((len(rows), num_tokens), np.bool_)
    for row, row_documents in enumerate(rows):
        start = 0
        for number, encoded in enumerate(row_documents):
            end = start + len(encoded)
            token_ids[row, start:end] = encoded.token_ids
            owners[row, start:end] = number
            trained[row, start + 1 : end] = encoded.is_trained[1:]  # nothing precedes the first token
            start = end
    predicted = np.flatnonzero(trained)
    filling = (0, -len(predicted) % _TARGETS_MULTIPLE_OF)
    positions = np.pad(predicted - 1, filling)
    targets = np.pad(token_ids.reshape(-1)[predicted], filling, constant_values=IGNORED_TARGET)
    return Batch(*(torch.from_numpy(array) for array in (token_ids, owners, positions, targets)))

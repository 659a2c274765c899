"""Writes what encoders have made: OpenAI's and Cohere's objects, and Workers AI's results.

Numbers are written with nine digits, which is all that a float32 has. A large answer is written text by text, with a
turn of the event loop between: 2,048 embeddings of 1,024 dimensions are 25 MB.
"""

from __future__ import annotations

import asyncio
import binascii
import math
import operator
import sys
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from control_plane.dispatch.encoding import floats
from control_plane.text.text_service import Encoded


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class RankedText(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class NativeEmbeddings(TypedDict):
    shape: list[int]
    data: list[list[float]]
    pooling: str


class NativeScore(TypedDict):
    id: int
    score: float


class NativeScores(TypedDict):
    response: list[NativeScore]


class NativeClass(TypedDict):
    label: str
    score: float


async def written(encoded: Encoded, request_id: str) -> AsyncIterator[bytes]:
    """Yield the answer's body, in pieces of one text each."""
    match encoded.form.kind:
        case "embeddings":
            pieces = _embeddings(encoded)
        case "native_embeddings":
            pieces = _native_embeddings(encoded)
        case "rerank":
            pieces = iter([msgspec.json.encode(_ranking(encoded, request_id))])
        case "native_scores":
            pieces = iter([msgspec.json.encode(_native_scores(encoded))])
        case "native_classes":
            pieces = iter([msgspec.json.encode(_native_classes(encoded))])
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


def rows(encoded: Encoded) -> Iterator[array[float]]:
    """Yield the values of each input."""
    encoder = encoded.model.encoder
    assert encoder is not None, "only encoders have values"
    step = 4 * encoder.num_values
    for start in range(0, len(encoded.values), step):
        yield floats(encoded.values[start : start + step])


def _embeddings(encoded: Encoded) -> Iterator[bytes]:
    yield b'{"object":"list","data":['
    for index, row in enumerate(rows(encoded)):
        vector = _cut(row, encoded)
        value = b'"%b"' % _base64(vector) if encoded.form.as_base64 else _numbers(vector)
        comma = b"," if index else b""
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, value)
    rest = {"model": encoded.form.model, "usage": _usage(encoded)}
    yield b"]," + msgspec.json.encode(rest)[1:]


def _native_embeddings(encoded: Encoded) -> Iterator[bytes]:
    encoder = encoded.model.encoder
    assert encoder is not None, "only encoders have values"
    num_texts = len(encoded.values) // (4 * encoder.num_values)
    name = "response" if encoded.form.is_response else "data"
    yield b'{"shape":[%d,%d],"%b":[' % (num_texts, encoder.num_values, name.encode())
    for index, row in enumerate(rows(encoded)):
        yield (b"," if index else b"") + _numbers(row)
    yield b'],"pooling":%b}' % msgspec.json.encode(encoded.form.pooling)


def _cut(row: array[float], encoded: Encoded) -> Sequence[float]:
    """Return the dimensions that are asked for, with the length 1 again if the model's embeddings have it."""
    encoder, most = encoded.model.encoder, encoded.form.num_dimensions
    if most is None or most >= len(row):
        return row
    short = row[:most]
    length = math.sqrt(math.fsum(value * value for value in short))
    if encoder is None or not encoder.is_normalized or not length:
        return short
    return array("f", [value / length for value in short])


def _ranking(encoded: Encoded, request_id: str) -> Ranking:
    documents = encoded.form.documents
    results: list[Ranked] = []
    for index, score in _best(_scores(encoded), encoded.form.most):
        entry: Ranked = {"index": index, "relevance_score": score}
        if documents is not None:
            entry["document"] = {"text": documents[index]}
        results.append(entry)
    return {"id": request_id, "model": encoded.form.model, "results": results, "usage": _usage(encoded)}


def _native_scores(encoded: Encoded) -> NativeScores:
    is_ranking = encoded.model.task == "text-ranking"
    scores = _scores(encoded) if is_ranking else _cosines(list(rows(encoded)))
    return {"response": [{"id": index, "score": score} for index, score in _best(scores, encoded.form.most)]}


def _native_classes(encoded: Encoded) -> list[NativeClass]:
    """Return the classes by falling probability, as Workers AI does."""
    encoder = encoded.model.encoder
    assert encoder is not None, "a classifier has labels"
    classes = zip(encoder.labels, next(rows(encoded)), strict=True)
    found: list[NativeClass] = [{"label": label, "score": score} for label, score in classes]
    return sorted(found, key=lambda each: -each["score"])


def _scores(encoded: Encoded) -> list[float]:
    """Return the logit of each pair as a number from 0 to 1."""
    return [_sigmoid(row[0]) for row in rows(encoded)]


def _sigmoid(logit: float) -> float:
    if logit < 0:  # e to the power of a large number would overflow
        return math.exp(logit) / (1 + math.exp(logit))
    return 1 / (1 + math.exp(-logit))


def _cosines(vectors: Sequence[array[float]]) -> list[float]:
    """Return the cosine of the first vector with each of the others."""
    first, *others = vectors
    length = math.hypot(*first)
    return [sum(map(operator.mul, first, other)) / ((length * math.hypot(*other)) or 1.0) for other in others]


def _best(scores: Sequence[float], most: int | None) -> list[tuple[int, float]]:
    """Return index and score, the best first; of equals the earlier one."""
    return sorted(enumerate(scores), key=lambda each: -each[1])[:most]


def _usage(encoded: Encoded) -> EmbeddingUsage:
    num_tokens = encoded.usage.num_prompt_tokens
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _numbers(values: Sequence[float]) -> bytes:
    return b"[" + b",".join([b"%.9g" % value for value in values]) + b"]"


def _base64(values: Sequence[float]) -> bytes:
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return binascii.b2a_base64(packed.tobytes(), newline=False)


ANSWERS: tuple[Any, ...] = (EmbeddingList, Ranking, NativeEmbeddings, NativeScores, NativeClass)

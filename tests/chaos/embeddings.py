"""The embeddings of a run, with the vectors of undisturbed workers, and the encoder that they are asked of.

Each text's vector comes from a request of its own, before any fault: it depends on no other text of a batch.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from tests.chaos.http_client import HttpQuestion
from tests.tandem_engine.encoder.checkpoints import make, write_sentence_files

MODEL_ID = "chaos-bert"
_NUM_TEXTS = 32
_NUM_QUESTIONS = 24
_MOST_TEXTS = 12
"""Of one request."""


@dataclass(frozen=True)
class EmbeddingQuestion(HttpQuestion):
    """A body, and the vectors of its texts."""

    vectors: tuple[str, ...]
    """Each as the answer has it, in base64."""
    path: ClassVar[str] = "/v1/embeddings"

    def difference(self, answer: Mapping[str, Any]) -> str:
        vectors = tuple(each["embedding"] for each in sorted(answer["data"], key=lambda each: int(each["index"])))
        if len(vectors) != len(self.vectors):
            return f"{len(vectors)} vectors for {len(self.vectors)} texts"
        wrong = [place for place, pair in enumerate(zip(vectors, self.vectors, strict=True)) if pair[0] != pair[1]]
        if wrong:
            shown = [base64.b64decode(each[wrong[0]])[:16].hex() for each in (vectors, self.vectors)]
            return f"vectors {wrong} differ, the first from {shown[1]} with {shown[0]}"
        num_tokens = answer["usage"]["prompt_tokens"]
        return "" if num_tokens == self.num_prompt_tokens else f"{num_tokens} tokens, not {self.num_prompt_tokens}"


def make_encoder(folder: Path) -> Path:
    """Return the folder of the run's encoder: tiny, with random weights."""
    target = folder / MODEL_ID
    make("bert", target)
    write_sentence_files(target, "pooling_mode_mean_tokens")
    return target


async def make_embedding_questions(http: httpx.AsyncClient, rng: random.Random) -> list[EmbeddingQuestion]:
    """Return requests for one text or several, with repetitions among them."""
    texts = [f"text {number} " + "about caches " * rng.randrange(7) for number in range(_NUM_TEXTS)]
    alone = [await _answered(http, [text]) for text in texts]
    questions = []
    for _ in range(_NUM_QUESTIONS):
        places = rng.choices(range(_NUM_TEXTS), k=rng.randint(1, _MOST_TEXTS))
        found = [alone[place] for place in places]
        num_tokens = sum(int(each["usage"]["prompt_tokens"]) for each in found)
        vectors = tuple(each["data"][0]["embedding"] for each in found)
        body = _body([texts[place] for place in places])
        questions.append(EmbeddingQuestion(body, (), (), 0, num_tokens, vectors))
    return questions


async def _answered(http: httpx.AsyncClient, texts: Sequence[str]) -> dict[str, Any]:
    response = await http.post(EmbeddingQuestion.path, json=_body(texts))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _body(texts: Sequence[str]) -> dict[str, Any]:
    return {"model": MODEL_ID, "input": list(texts), "encoding_format": "base64"}

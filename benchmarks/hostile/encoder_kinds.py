"""The kinds of hostile requests to the endpoints of embeddings, rankings and classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.hostile.exchange import Script, post
from benchmarks.hostile.maker import Kinds, Maker, words

ENCODERS = Kinds("bodies")
EMBEDDER = "embedder"
"""The stand-in's model."""


@ENCODERS.kind()
def _embed_one_text_of_the_largest_body(make: Maker) -> Sequence[Script]:
    return _embed(make, input=words(make.fill(1) - 200, make.chance))


@ENCODERS.kind()
def _embed_the_largest_body_cut(make: Maker) -> Sequence[Script]:
    return _embed(make, input=words(make.fill(1) - 200, make.chance), truncate_prompt_tokens=-1)


@ENCODERS.kind()
def _embed_2048_texts(make: Maker) -> Sequence[Script]:
    return _embed(make, input=["x y z " * 20] * min(2_048, make.fill(140)))


@ENCODERS.kind()
def _embed_too_many_texts(make: Maker) -> Sequence[Script]:
    return _embed(make, input=["x"] * make.fill(5))


@ENCODERS.kind()
def _embed_lists_of_ids(make: Maker) -> Sequence[Script]:
    return _embed(make, input=[[7] * 400] * min(2_048, make.fill(1_300)))


@ENCODERS.kind()
def _embed_nested_lists(make: Maker) -> Sequence[Script]:
    return _embed(make, input=[[[1]]] * min(30_000, make.fill(8)))


@ENCODERS.kind()
def _embed_huge_ids(make: Maker) -> Sequence[Script]:
    return _embed(make, input=[10**17] * make.fill(20))


@ENCODERS.kind()
def _embed_contexts(make: Maker) -> Sequence[Script]:
    path = f"/client/v4/accounts/{make.account}/ai/run/{EMBEDDER}"
    contexts = [{"text": "word " * 200}] * min(100, make.fill(1_100))
    return [Script([post(path, {"query": "q", "contexts": contexts, "truncate_inputs": True}, make.token)])]


@ENCODERS.kind()
def _rank_too_many_documents(make: Maker) -> Sequence[Script]:
    body = {"model": EMBEDDER, "query": "q", "documents": [{"text": "d"}] * min(60_000, make.fill(14))}
    return [Script([post("/v1/rerank", body, make.token)])]


def _embed(make: Maker, **fields: Any) -> Sequence[Script]:
    return [Script([post("/v1/embeddings", {"model": EMBEDDER, **fields}, make.token)])]

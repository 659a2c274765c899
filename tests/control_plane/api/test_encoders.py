"""Embeddings, rankings and classes over HTTP, in every form; the values come from a stand-in for the workers."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, processors

from control_plane.generation import EncoderFacts, EncoderInput, EncodingRequest, TokenIds
from control_plane.text_processes.pool import TextProcesses
from tandem_runtime.errors import Overloaded
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import byte_level_tokenizer, ids_of

NUM_VALUES = 4
EMBEDDING = {"task": "text-embedding", "encoder": EncoderFacts(NUM_VALUES, (), "cls", True)}
RANKING = {"task": "text-ranking", "encoder": EncoderFacts(1, has_pairs=True)}
CLASSES = {"task": "text-classification", "encoder": EncoderFacts(2, ("NEGATIVE", "POSITIVE"), has_pairs=True)}
RUN = "/client/v4/accounts/me/ai/run/demo"


class Encoders:
    """Answers with values that depend on an input's tokens alone, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[EncodingRequest] = []
        self.refusal: Exception | None = None
        self.holds: asyncio.Event | None = None
        self.was_cancelled = asyncio.Event()

    async def encode(self, request: EncodingRequest, computed: list[int]) -> bytes:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.holds is not None:
            try:
                await self.holds.wait()
            except asyncio.CancelledError:
                self.was_cancelled.set()
                raise
        computed.extend(each.num_tokens for each in request.inputs)
        assert request.model.encoder is not None
        return b"".join(values(each, request.model.encoder.num_values) for each in request.inputs)


def values(each: EncoderInput, num: int) -> bytes:
    """Return `num` values of one input; of several, a vector of length 1."""
    ids = TokenIds.unpack(each.token_ids)
    if num == 1:
        return struct.pack("<f", (sum(ids) % 19) - 9)
    found = [1.0 + (sum(ids) * (index + 1)) % 7 for index in range(num)]
    length = math.hypot(*found)
    return struct.pack(f"<{num}f", *(value / length for value in found))


def numbers(text: str, num: int = NUM_VALUES) -> list[float]:
    """Return what a text's vector is."""
    each = EncoderInput(TokenIds(byte_level_tokenizer().encode(text).ids).packed())
    return list(struct.unpack(f"<{num}f", values(each, num)))


def pair_tokenizer() -> bytes:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    return tokenizer.to_str().encode()


@asynccontextmanager
async def served(model: dict[str, Any], **options: Any) -> AsyncIterator[tuple[Gateway, Encoders]]:
    encoders = Encoders()
    async with serve(encoders=encoders, **model, **options) as gateway:
        yield gateway, encoders


async def embedded(gateway: Gateway, **body: Any) -> Any:
    answer = await gateway.client.post("/v1/embeddings", json={"model": "demo", **body})
    return answer.json() | {"status": answer.status_code}


async def refusal(gateway: Gateway, path: str, **body: Any) -> str:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.text


# --------------------------------------------------------------------------------------------------------- embeddings


async def test_a_text_some_texts_and_token_ids_have_vectors_in_their_order() -> None:
    ids = [0, *ids_of("Hello")]
    async with served(EMBEDDING) as (gateway, encoders):
        one = await embedded(gateway, input="Hello")
        several = await embedded(gateway, input=["world", "Hello", "how are you"])
        of_ids = await embedded(gateway, input=[ids, [1, 2]])
        of_one = await embedded(gateway, input=ids)
    assert one["data"][0]["embedding"] == pytest.approx(numbers("Hello"))
    assert [each["index"] for each in several["data"]] == [0, 1, 2]
    assert several["data"][1]["embedding"] == one["data"][0]["embedding"] == of_ids["data"][0]["embedding"]
    assert of_one["data"] == one["data"]
    assert (one["object"], one["model"], one["data"][0]["object"]) == ("list", "demo", "embedding")
    assert one["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert list(TokenIds.unpack(encoders.requests[2].inputs[1].token_ids)) == [1, 2]


async def test_base64_has_the_bytes_of_the_same_numbers() -> None:
    async with served(EMBEDDING) as (gateway, _):
        floats = await embedded(gateway, input="Hello", encoding_format="float")
        packed = await embedded(gateway, input="Hello", encoding_format="base64")
    found = struct.unpack("<4f", base64.b64decode(packed["data"][0]["embedding"]))
    assert found == tuple(struct.unpack("<4f", struct.pack("<4f", *floats["data"][0]["embedding"])))


async def test_fewer_dimensions_are_the_first_ones_with_length_1_again() -> None:
    async with served(EMBEDDING) as (gateway, _):
        found = (await embedded(gateway, input="Hello", dimensions=2))["data"][0]["embedding"]
        more = await embedded(gateway, input="Hello", dimensions=5)
    assert math.hypot(*found) == pytest.approx(1) and len(found) == 2
    first, second, *_ = numbers("Hello")
    assert found[0] / found[1] == pytest.approx(first / second)
    assert more["status"] == 400 and "dimensions is 5, @tandem/demo makes 4" in more["error"]["message"]


async def test_a_text_that_is_too_long_is_named_and_cut_only_when_asked() -> None:
    async with served(EMBEDDING, context_length=8) as (gateway, encoders):
        refused = await embedded(gateway, input=["Hello", "x y " * 30])
        cut = await embedded(gateway, input=["Hello", "x y " * 30], truncate_prompt_tokens=-1)
        shorter = await embedded(gateway, input="x y " * 30, truncate_prompt_tokens=3)
    assert refused["status"] == 400 and "input[1] has " in refused["error"]["message"]
    assert cut["status"] == 200 and shorter["usage"]["prompt_tokens"] == 3
    assert encoders.requests[0].inputs[1].num_tokens == 8


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "input must be a string"),
        ({"input": ["a", ""]}, "input[1] is empty"),
        ({"input": [["a"]]}, "input must be a string"),
        ({"input": [[[1]]]}, "input must be a string"),
        ({"input": [1, 10**9]}, "1000000000"),
        ({"input": [-1]}, "-1"),
        ({"input": "a", "encoding_format": "hex"}, "send float or base64"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimension": 2}, "did you mean dimensions?"),
        ({"input": ["a"] * 2_049}, "has 2,049 entries, the maximum is 2,048"),
        ({"input": "\ud800"}, "is not valid JSON"),
        ({}, "input is missing"),
    ],
)
async def test_a_wrong_body_is_refused_by_field(body: dict[str, Any], words: str) -> None:
    async with served(EMBEDDING) as (gateway, encoders):
        answer = await gateway.client.post(
            "/v1/embeddings",
            content=json.dumps({"model": "demo", **body}),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert not encoders.requests


async def test_habitual_fields_are_taken_unless_the_gateway_is_strict() -> None:
    async with served(EMBEDDING) as (gateway, _):
        assert (await embedded(gateway, input="a", user="me"))["status"] == 200
    async with served(EMBEDDING, strict_fields=True) as (gateway, _):
        assert "user changes nothing here" in (await embedded(gateway, input="a", user="me"))["error"]["message"]


async def test_the_openai_sdk_gets_vectors() -> None:
    async with served(EMBEDDING) as (gateway, _), AsyncOpenAI(api_key="x", base_url=f"{gateway.url}/v1") as client:
        found = await client.embeddings.create(model="demo", input=["Hello", "world"])
    assert found.data[1].embedding == pytest.approx(numbers("world")) and found.usage.prompt_tokens > 0


async def test_a_large_answer_comes_whole() -> None:
    facts = EncoderFacts(1_024, (), "cls", True)
    async with served({"task": "text-embedding", "encoder": facts}) as (gateway, _):
        texts = [f"text {index}" for index in range(200)]
        found = await embedded(gateway, input=texts)
        native = await gateway.client.post(RUN, json={"text": texts[:100]})
    assert [len(each["embedding"]) for each in found["data"]] == [1_024] * 200
    assert found["data"][199]["embedding"] == pytest.approx(numbers("text 199", 1_024))
    assert native.json()["success"] and native.json()["result"]["shape"] == [100, 1_024]


async def test_a_text_process_prepares_texts_too() -> None:
    processes = TextProcesses()
    processes.start()
    try:
        async with served(EMBEDDING, preparer=processes) as (gateway, _):
            found = await embedded(gateway, input=["Hello", "x " * 100_000], truncate_prompt_tokens=-1)
            hostile = await embedded(gateway, input=[["a"]] * 2_000)
    finally:
        await processes.close()
    assert found["data"][0]["embedding"] == pytest.approx(numbers("Hello")) and found["status"] == 200
    assert hostile["status"] == 400


async def test_a_refusal_keeps_its_status_and_a_client_that_leaves_ends_the_request() -> None:
    async with served(EMBEDDING) as (gateway, encoders):
        encoders.refusal = Overloaded("every encode worker of m is busy", retry_after_seconds=1.0)
        busy = await gateway.client.post("/v1/embeddings", json={"model": "demo", "input": "a"})
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        encoders.refusal, encoders.holds = None, asyncio.Event()
        leaving = asyncio.create_task(embedded(gateway, input="a"))
        async with asyncio.timeout(10):
            while len(encoders.requests) < 2:  # noqa: ASYNC110 - the stand-in tells nobody
                await asyncio.sleep(0.01)
            leaving.cancel()
            await encoders.was_cancelled.wait()


# ----------------------------------------------------------------------------------------------------------- rankings


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/client/v4/accounts/me/ai/v1/rerank"])
async def test_documents_are_ranked_by_falling_score(path: str) -> None:
    documents = ["one", {"text": "two"}, "three", "four"]
    body = {"model": "demo", "query": "which?", "documents": documents}
    async with served(RANKING, tokenizer_json=pair_tokenizer()) as (gateway, encoders):
        found = (await gateway.client.post(path, json=body)).json()
        best = (await gateway.client.post(path, json={**body, "top_n": 2, "return_documents": True})).json()
    scores = [each["relevance_score"] for each in found["results"]]
    assert sorted(each["index"] for each in found["results"]) == [0, 1, 2, 3]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert [each["index"] for each in best["results"]] == [each["index"] for each in found["results"][:2]]
    assert best["results"][0]["document"]["text"] in ("one", "two", "three", "four")
    first = encoders.requests[0].inputs[0]
    ids = list(TokenIds.unpack(first.token_ids))
    assert ids == [0, *ids_of("which?"), 1, *ids_of("one"), 1]
    assert first.num_first_tokens == len(ids_of("which?")) + 2
    assert found["usage"]["prompt_tokens"] == sum(each.num_tokens for each in encoders.requests[0].inputs)


async def test_a_ranking_cuts_documents_and_refuses_wrong_bodies() -> None:
    async with served(RANKING, tokenizer_json=pair_tokenizer(), context_length=24) as (gateway, encoders):
        body = {"model": "demo", "query": "which?", "documents": ["long " * 200]}
        assert (await gateway.client.post("/v1/rerank", json=body)).status_code == 200
        assert encoders.requests[0].inputs[0].num_tokens == 24
        path = "/v1/rerank"
        assert "documents[1] is empty" in await refusal(gateway, path, model="demo", query="a", documents=["b", ""])
        many = await refusal(gateway, path, model="demo", query="a", documents=["b"] * 1_001)
        assert "documents has 1,001 entries, the maximum is 1,000" in many
        assert "query" in await refusal(gateway, path, model="demo", query="", documents=["b"])
        assert "top_n" in await refusal(gateway, path, model="demo", query="a", documents=["b"], top_n=0)


# --------------------------------------------------------------------------------------------------------- Workers AI


async def test_workers_ai_s_embeddings_have_shape_data_and_pooling() -> None:
    async with served(EMBEDDING) as (gateway, encoders):
        one = (await gateway.client.post(RUN, json={"text": "Hello"})).json()
        two = (await gateway.client.post(RUN, json={"text": ["Hello", "world"], "pooling": "cls"})).json()
        named = await gateway.client.post(
            "/client/v4/accounts/me/ai/run", json={"model": "demo", "input": {"text": ["Hello"]}}
        )
        bound = await gateway.client.post(
            "/run", json={"inputs": {"text": "Hello"}, "options": {}}, headers={"cf-consn-model-id": "demo"}
        )
    assert one["success"] and one["result"]["shape"] == [1, NUM_VALUES] and one["result"]["pooling"] == "mean"
    assert one["result"]["data"][0] == pytest.approx(numbers("Hello"))
    assert two["result"]["pooling"] == "cls" and two["result"]["shape"] == [2, NUM_VALUES]
    assert [request.pooling for request in encoders.requests[:2]] == ["mean", "cls"]
    assert named.json()["result"] == bound.json() == one["result"]


async def test_workers_ai_s_contexts_are_scored_or_embedded() -> None:
    contexts = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
    async with served(EMBEDDING, context_length=8) as (gateway, _):
        scored = (await gateway.client.post(RUN, json={"query": "two", "contexts": contexts, "top_k": 2})).json()
        vectors = (await gateway.client.post(RUN, json={"contexts": contexts})).json()["result"]
        long = await gateway.client.post(RUN, json={"contexts": [{"text": "x y " * 30}]})
        cut = await gateway.client.post(RUN, json={"contexts": [{"text": "x y " * 30}], "truncate_inputs": True})
        text = await gateway.client.post(RUN, json={"text": "x y " * 30})
    assert scored["result"]["response"][0] == {"id": 1, "score": pytest.approx(1)}
    assert len(scored["result"]["response"]) == 2
    assert vectors["response"][0] == pytest.approx(numbers("one")) and vectors["pooling"] == "cls"
    assert long.status_code == 400 and "contexts[0] has " in long.text
    assert (cut.status_code, text.status_code) == (200, 200), "a text is cut, contexts when asked"
    async with served(RANKING, tokenizer_json=pair_tokenizer()) as (gateway, _):
        ranked = (await gateway.client.post(RUN, json={"query": "q", "contexts": contexts})).json()["result"]
    scores = [each["score"] for each in ranked["response"]]
    assert scores == sorted(scores, reverse=True) and {each["id"] for each in ranked["response"]} == {0, 1, 2}


async def test_workers_ai_s_classes_are_a_bare_list() -> None:
    async with served(CLASSES) as (gateway, _):
        found = (await gateway.client.post(RUN, json={"text": "fine"})).json()["result"]
        two = await gateway.client.post(RUN, json={"text": ["a", "b"]})
    assert {each["label"] for each in found} == {"NEGATIVE", "POSITIVE"} and found[0]["score"] >= found[1]["score"]
    assert two.status_code == 400 and "a classifier takes one" in two.text


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"text": ["a"] * 101}, "text"),
        ({"text": "a", "contexts": [{"text": "b"}]}, "send text, or contexts"),
        ({"query": "a"}, "send text, or contexts"),
        ({"text": "a", "query": "b"}, "query needs contexts"),
        ({"text": "a", "pooling": "max"}, "send mean or cls"),
        ({"text": "a", "max_tokens": 3}, "max_tokens"),
        ({"contexts": [{"txt": "b"}]}, "contexts[0].text is missing"),
        ({"contexts": [{"text": "b"}] * 101}, "101 entries"),
        ({"text": [""]}, "text[0] is empty"),
    ],
)
async def test_wrong_inputs_are_refused_by_field(inputs: dict[str, Any], words: str) -> None:
    async with served(EMBEDDING) as (gateway, encoders):
        answer = await gateway.client.post(RUN, json=inputs)
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert not encoders.requests


# -------------------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    ("model", "path", "body", "words"),
    [
        (EMBEDDING, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "makes embeddings"),
        (EMBEDDING, "/v1/completions", {"prompt": "a"}, "to /v1/embeddings"),
        (EMBEDDING, "/v1/rerank", {"query": "a", "documents": ["b"]}, "makes embeddings"),
        (RANKING, "/v1/embeddings", {"input": "a"}, "ranks texts"),
        (CLASSES, "/v1/embeddings", {"input": "a"}, "classifies texts"),
        ({}, "/v1/embeddings", {"input": "a"}, "writes text"),
        ({}, RUN, {"text": "a"}, "writes text"),
        (EMBEDDING, RUN, {"prompt": "a"}, "makes embeddings"),
        (RANKING, RUN, {"text": "a"}, "ranks texts"),
    ],
)
async def test_a_model_of_another_task_is_refused_with_what_it_does(
    model: dict[str, Any], path: str, body: dict[str, Any], words: str
) -> None:
    async with served(model) as (gateway, encoders):
        answer = await gateway.client.post(path, json=body if path == RUN else {"model": "demo", **body})
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert not encoders.requests and not gateway.dispatcher.requests


async def test_the_lists_show_a_model_s_task_and_its_schemas() -> None:
    for model, name in ((EMBEDDING, "Text Embeddings"), (RANKING, "Text Classification")):
        async with served(model) as (gateway, _):
            found = (await gateway.client.get("/client/v4/accounts/me/ai/models/search", params={"task": name})).json()
            none = await gateway.client.get(
                "/client/v4/accounts/me/ai/models/search", params={"task": "Text Generation"}
            )
            schema = await gateway.client.get("/client/v4/accounts/me/ai/models/schema", params={"model": "demo"})
        assert [each["task"]["name"] for each in found["result"]] == [name] and not none.json()["result"]
        assert "contexts" in schema.json()["result"]["input"]["properties"]

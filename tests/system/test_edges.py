"""Edge cases that other systems get wrong come out right through every layer."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import httpx
import pytest

from control_plane.generation import ModelDescription
from tests.system.fleet import Fleet
from tests.system.streams import MODEL, client, run, stream, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={"model": MODEL, "prompt": "Once upon a time", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def described(fleet: Fleet) -> ModelDescription:
    return await fleet.gateway.catalog.get(MODEL)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/completions streamed"])
async def test_eos_at_the_first_token_is_an_empty_answer_that_stopped(demo_fleet: Fleet, route: str) -> None:
    eos = (await described(demo_fleet)).eos_token_ids[0]
    body = {"model": MODEL, "prompt": "Hello", "logit_bias": {str(eos): 100}, "temperature": 0}
    async with client(demo_fleet.base_url) as http:
        if route.endswith("streamed"):
            response = await http.post("/v1/completions", json={**body, "stream": True})
            chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            assert response.text.rstrip().endswith("data: [DONE]")
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert "".join(choice["text"] for choice in choices) == ""
            assert choices[-1]["finish_reason"] == "stop"
        else:
            answer = await complete(http, **body)
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
        await demo_fleet.pools_are_full()


async def test_a_stop_string_in_the_first_token_ends_the_answer(demo_fleet: Fleet) -> None:
    async with client(demo_fleet.base_url) as http:
        token_id = (await complete(http, prompt="x", max_tokens=1, temperature=0, logit_bias={"100": 100}))["choices"]
        word = token_id[0]["text"]
        assert word
        answer = await complete(http, temperature=0, logit_bias={"100": 100}, stop=word, max_tokens=50)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] <= 3
        await demo_fleet.pools_are_full()


async def test_max_tokens_1_is_one_token(demo_fleet: Fleet) -> None:
    async with client(demo_fleet.base_url) as http:
        answer = await complete(http, max_tokens=1, seed=1)
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")
        events = await stream(http, {"prompt": "Hi", "max_tokens": 1, "seed": 1})
        assert events[-1]["usage"]["completion_tokens"] == 1
        await demo_fleet.pools_are_full()


async def test_the_first_tokens_logprobs_survive_the_hand_over(demo_fleet: Fleet) -> None:
    async with client(demo_fleet.base_url) as http:
        answer = await complete(http, max_tokens=4, temperature=0, logprobs=3, logit_bias={"1": -100, "2": -100})
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen <= 0 and len(top) >= 3
        assert max(top.values()) == pytest.approx(chosen, abs=1e-4)  # greedy: the chosen one is the likeliest


async def test_n_2_is_two_answers_and_a_seed_fixes_both(demo_fleet: Fleet) -> None:
    body = {"n": 2, "seed": 11, "temperature": 1.5, "max_tokens": 12}
    async with client(demo_fleet.base_url) as http:
        first, again = await complete(http, **body), await complete(http, **body)
        texts = [choice["text"] for choice in first["choices"]]
        assert texts == [choice["text"] for choice in again["choices"]]
        assert texts[0] != texts[1]
        assert first["usage"]["prompt_tokens"] < 30  # once, not per choice
        await demo_fleet.pools_are_full()


async def test_the_context_may_be_filled_and_not_exceeded(demo_fleet: Fleet) -> None:
    length = (await described(demo_fleet)).context_length
    async with client(demo_fleet.base_url) as http:
        answer = await complete(http, prompt=[7] * length, max_tokens=5, ignore_eos=True)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (length, 1)
        assert answer["choices"][0]["finish_reason"] == "length"
        nearly = await complete(http, prompt=[7] * (length - 3), max_tokens=50, ignore_eos=True)
        assert nearly["usage"]["completion_tokens"] == 3
        refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": [7] * (length + 1)})
        assert refused.status_code == 400
        assert f"{length + 1:,}" in refused.json()["error"]["message"]
        assert f"{length:,}" in refused.json()["error"]["message"]
        await demo_fleet.pools_are_full()


BAD: list[tuple[str, str, Any, int, str]] = [
    ("an unknown model", "/v1/completions", {"model": "nobody/none", "prompt": "x"}, 404, "nobody/none"),
    ("malformed JSON", "/v1/chat/completions", "{", 400, "JSON"),
    ("a wrong type", "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    ("out of range", "/v1/completions", {"model": MODEL, "prompt": "x", "temperature": -1}, 400, "temperature"),
    ("an empty prompt", "/v1/completions", {"model": MODEL, "prompt": ""}, 400, "prompt"),
    ("no messages", "/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "messages"),
]


@pytest.mark.parametrize(("what", "path", "body", "status", "named"), BAD, ids=[case[0] for case in BAD])
async def test_bad_input_is_refused_by_name_in_openais_shape(
    demo_fleet: Fleet, what: str, path: str, body: Any, status: int, named: str
) -> None:
    async with client(demo_fleet.base_url) as http:
        content = body if isinstance(body, str) else json.dumps(body)
        response = await http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, f"{what}: {response.text}"
    error = response.json()["error"]
    assert named in error["message"] and set(error) == {"message", "type", "param", "code"}


WORKERS_AI_BAD: list[tuple[str, str, str, int, int]] = [
    ("an unknown model", "@cf/none/such", '{"prompt": "x"}', 400, 5007),
    ("malformed JSON", MODEL, "{", 400, 5006),
    ("a wrong type", MODEL, '{"prompt": 5}', 400, 5006),
    ("out of range", MODEL, '{"prompt": "x", "temperature": 99}', 400, 5006),
    ("neither prompt nor messages", MODEL, "{}", 400, 5006),
    ("an empty prompt", MODEL, '{"prompt": ""}', 400, 5006),
]


@pytest.mark.parametrize(
    ("what", "model", "body", "status", "code"), WORKERS_AI_BAD, ids=[case[0] for case in WORKERS_AI_BAD]
)
async def test_bad_input_is_refused_by_code_in_cloudflares_shapes(
    demo_fleet: Fleet, what: str, model: str, body: str, status: int, code: int
) -> None:
    async with client(demo_fleet.base_url) as http:
        rest = await http.post(f"/client/v4/accounts/a/ai/run/{model}", content=body)
        assert rest.status_code == status, f"{what}: {rest.text}"
        assert rest.json()["success"] is False and rest.json()["errors"][0]["code"] == code
        inputs = body if body == "{" else f'{{"inputs": {body}, "options": {{}}}}'
        bound = await http.post("/run?version=3", content=inputs, headers={"cf-consn-model-id": model})
        assert (bound.status_code, bound.json()["internalCode"]) == (status, code)
        assert set(bound.json()) == {"internalCode", "name", "message", "description"}


async def test_a_gateway_on_loopback_answers_to_this_machines_names_and_those_of_workers(demo_fleet: Fleet) -> None:
    async with client(demo_fleet.base_url) as http:
        statuses = [
            (await http.get("/v1/models", headers={"host": host})).status_code
            for host in ("localhost:8642", "127.0.0.1", "workers-binding.ai", "rebound.example", "0.0.0.0")
        ]
        form = {"content-type": "text/plain", "origin": "https://evil.example"}
        posted = await http.post("/v1/completions", content=b'{"model": "demo", "prompt": "a"}', headers=form)
        head = await http.get("/v1/models", headers={"x-long": "a" * 70_000})
    assert statuses == [200, 200, 200, 403, 403]
    assert (posted.status_code, head.status_code) == (403, 431)


async def test_readyz_is_true_once_a_request_has_gone_the_whole_way(demo_fleet: Fleet) -> None:
    async with client(demo_fleet.base_url) as http:
        await run(http, {"prompt": "Hi", "max_tokens": 2})
        response = await http.get("/readyz")
        assert (response.status_code, response.json()["ready"]) == (200, True)
        workers = {worker["id"]: worker for worker in (await http.get("/v1/workers")).json()["data"]}
    assert set(workers) == {"kv-0", "prefill-0", "decode-0"}
    pool = workers["decode-0"]["kv"]
    assert pool["total_blocks"] == 256 == pool["free_blocks"] + pool["cached_blocks"] + pool["used_blocks"]
    assert workers["prefill-0"]["memory"]["source"]


async def test_a_worker_that_does_not_answer_is_a_clear_error_and_not_a_hang(demo_fleet: Fleet) -> None:
    """The only decode worker is stopped: streams end with an error, new requests get one; then all is well again."""
    service = demo_fleet.services["decode-0"]
    async with client(demo_fleet.base_url) as http:
        events: asyncio.Task[list[dict[str, Any]]] = asyncio.create_task(
            stream(http, {"prompt": "Once upon a time", "raw": True, "max_tokens": 400, "temperature": 5, "seed": 4})
        )
        await asyncio.sleep(0)
        service.kill(signal.SIGSTOP)
        try:
            inputs = {"prompt": "Hi", "options": {"rejectIfBusy": True}}
            refused = await http.post(f"/client/v4/accounts/a/ai/run/{MODEL}", json=inputs)
            assert refused.status_code in (429, 503), refused.text
            assert refused.json()["errors"][0]["code"] == 3040
            with pytest.raises((AssertionError, httpx.RemoteProtocolError)):
                await events
        finally:
            service.kill(signal.SIGCONT)
        await demo_fleet.ready()
        assert text_of(await stream(http, {"prompt": "Hi", "max_tokens": 8, "seed": 2})) is not None
        await demo_fleet.pools_are_full(30)

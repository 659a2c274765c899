"""Every run option takes effect, or is refused by name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
RUN = "/client/v4/accounts/me/ai/run/demo"
BINDING = {"cf-consn-model-id": "demo"}


async def run(gateway: Gateway, endpoint: str, options: Any) -> tuple[int, str]:
    """Run with `options`, where that endpoint has them; return the status and the words of the answer."""
    if endpoint == "binding":
        body: dict[str, Any] = {"inputs": {"prompt": "hi"}, "options": options}
        response = await gateway.client.post("/run", json=body, headers=BINDING)
    elif endpoint == "rest":
        response = await gateway.client.post(RUN, json={"prompt": "hi", "options": options})
    else:
        body = {"model": "demo", "prompt": "hi", "options": options}
        response = await gateway.client.post("/v1/completions", json=body)
    return response.status_code, response.text


ENDPOINTS = ["binding", "rest", "openai"]
WHAT_IS_KNOWN: dict[str, Any] = {
    "tags": ["team:a", "b-1/c@d.e"],
    "gateway": {"id": "gw", "skipCache": True, "cacheTtl": 60, "metadata": {"u": 1}, "requestTimeoutMs": 5000},
    "returnRawResponse": True,
    "rejectIfBusy": True,
    "queueRequest": False,
    "websocket": None,
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_the_documented_options_are_taken(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        for options in (WHAT_IS_KNOWN, {}, None):
            assert (await run(gateway, endpoint, options))[0] == 200
    assert [request.reject_if_busy for request in gateway.dispatcher.requests] == [True, False, False]
    known, plain, _ = gateway.dispatcher.requests
    assert 50 < plain.deadline - known.deadline < 60  # 5 s of the gateway's options, and the service's own 60


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_caller_can_shorten_the_operators_deadline_but_not_lengthen_it(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), timeout_seconds=60) as gateway:
        before = time.monotonic()
        assert (await run(gateway, endpoint, {"gateway": {"requestTimeoutMs": 2**31 - 1}}))[0] == 200
        (request,) = gateway.dispatcher.requests
        assert before + 60 <= request.deadline <= time.monotonic() + 60
        status, text = await run(gateway, endpoint, {"gateway": {"requestTimeoutMs": 2**31}})
        assert status == 400 and "requestTimeoutMs" in text


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queueRequest": True}, "options.queueRequest is not supported here (asynchronous batches)"),
        ({"websocket": True}, "options.websocket is not supported here"),
        ({"tags": ["a"] * 6}, "options.tags has 6 entries, the maximum is 5; send fewer"),
        ({"tags": ["x" * 51]}, "options.tags[0] has 51 characters, the maximum is 50; shorten it"),
        ({"tags": ["no spaces"]}, "options.tags[0] String should match pattern"),
        ({"tags": "a"}, "options.tags must be a list"),
        ({"rejectIfBusy": "yes"}, "options.rejectIfBusy should be a valid boolean"),
        ({"rejectIfBsy": True}, "options.rejectIfBsy is not a field of this request; did you mean rejectIfBusy?"),
        ({"gateway": {"requestTimeoutMs": 0}}, "options.gateway.requestTimeoutMs should be greater than or equal to 1"),
        ({"gateway": {"cache": True}}, "options.gateway.cache is not a field"),
        ([], "options"),
    ],
)
async def test_an_option_that_cannot_be_is_refused_by_name(endpoint: str, options: Any, words: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        status, text = await run(gateway, endpoint, options)
    assert status == 400 and words in text
    assert gateway.dispatcher.requests == []


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("rejectIfBusy=true", 200, "response"),
        ("rejectIfBusy=true&queueRequest=false&tags=a&version=3&gateway=undefined", 200, "response"),
        ("queueRequest=true", 400, "?queueRequest is not supported here (asynchronous batches); leave it out"),
        ("rejectIfBusy=perhaps", 400, '?rejectIfBusy should be a valid boolean, got \\"perhaps\\"'),
        ("max_tokens=5", 400, "?max_tokens is not a field of this request"),
    ],
)
async def test_rest_takes_run_options_from_the_query_too(query: str, status: int, words: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post(f"{RUN}?{query}", json={"prompt": "hi"})
    assert response.status_code == status and words in response.text
    assert [request.reject_if_busy for request in gateway.dispatcher.requests] == [True] * (status == 200)


async def test_what_the_binding_sends_for_a_stream_or_a_websocket_is_refused_by_name() -> None:
    async with serve() as gateway:
        query = "/run?tags=q&gateway=undefined&version=3&userInputs=%7B%22lang%22%3A%22en%22%7D"
        audio = await gateway.client.post(query, content=b"\x00", headers={**BINDING, "content-type": "audio/wav"})
        upgrade = {"connection": "upgrade", "upgrade": "websocket"}
        socket = await gateway.client.get("/run?version=3&body=%7B%7D", headers=upgrade)
    assert audio.status_code == socket.status_code == 400
    assert "streams as inputs (audio, images, forms) are not supported here" in audio.json()["description"]
    assert "options.websocket is not supported here" in socket.json()["description"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/run", {"inputs": {"prompt": "hi"}, "option": {}}),
        ("/client/v4/accounts/me/ai/run", {"model": "demo", "input": {"prompt": "hi"}, "prompt": "hi"}),
    ],
)
async def test_a_field_beside_the_inputs_is_not_overlooked(path: str, body: dict[str, Any]) -> None:
    async with serve() as gateway:
        response = await gateway.client.post(path, json=body, headers=BINDING)
    assert response.status_code == 400 and "is not a field of this request, which has" in response.text


@pytest.mark.parametrize("endpoint", ["binding", "rest"])
async def test_an_adapter_that_no_worker_has_is_not_found(endpoint: str) -> None:
    inputs = {"prompt": "hi", "lora": "x"}
    async with serve() as gateway:
        if endpoint == "binding":
            response = await gateway.client.post("/run", json={"inputs": inputs}, headers=BINDING)
        else:
            response = await gateway.client.post(RUN, json=inputs)
    assert response.status_code == 400 and "no adapter 'x' of" in response.text


@pytest.mark.parametrize(
    "path", ["/to-everything/markdown/supported", "/autorag/rags", "/ai-gateway/gateways/g/url/universal"]
)
async def test_the_bindings_other_calls_get_the_error_that_it_reads(path: str) -> None:
    async with serve() as gateway:
        response = await gateway.client.get(path)
    assert response.status_code == 404 and "no route" in response.json()["errors"][0]["message"]

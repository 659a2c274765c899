"""Every failure reaches the client in its endpoint's format, and no work continues after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from control_plane.api.http.errors import public_message
from control_plane.api.http.request_context import HttpSettings
from tandem_runtime.errors import (
    Aborted,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world, how are you"), 1]
HEADERS = {"cf-consn-model-id": "demo"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"model": "demo", "prompt": ["a", "b"]}),
    "cloudflare": ("/client/v4/accounts/me/ai/run/demo", {"prompt": "hi"}),
    "binding": ("/run", {"inputs": {"prompt": "hi"}}),
}


def streaming(endpoint: str) -> tuple[str, dict[str, Any]]:
    path, body = CALLS[endpoint]
    return path, {"inputs": {**body["inputs"], "stream": True}} if endpoint == "binding" else {**body, "stream": True}


async def post(gateway: Gateway, endpoint: str) -> httpx.Response:
    path, body = CALLS[endpoint]
    return await gateway.client.post(path, json=body, headers=HEADERS)


def code_of(endpoint: str, body: Any) -> Any:
    if endpoint == "cloudflare":
        return body["errors"][0]["code"]
    return body["internalCode"] if endpoint == "binding" else body["error"]["type"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "cloudflare_status", "code"),
    [
        (Overloaded("full"), 429, "rate_limit_error", 429, 3040),
        (Draining("going"), 503, "rate_limit_error", 429, 3040),
        (Unavailable("no worker"), 503, "server_error", 503, 3040),
        (DeadlineExceeded("late"), 504, "timeout_error", 408, 3007),
        (Unauthenticated("who?"), 401, "invalid_request_error", 401, 10000),
        (InternalError("oh"), 500, "server_error", 500, 3043),
        (Aborted("stopped"), 500, "server_error", 500, 3008),
        (RuntimeError("a bug"), 500, "server_error", 500, 3043),
    ],
)
@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_refusal_has_the_endpoints_status_and_code(
    endpoint: str, error: Exception, status: int, kind: str, cloudflare_status: int, code: int
) -> None:
    async with serve(ScriptedDispatcher(Script(refuse=error))) as gateway:
        response = await post(gateway, endpoint)
    is_openai = endpoint in ("openai", "completions")
    assert response.status_code == (status if is_openai else cloudflare_status)
    assert code_of(endpoint, response.json()) == (kind if is_openai else code)
    assert response.headers["content-type"] == "application/json" and response.headers["cf-ai-req-id"]
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503))
    is_final = isinstance(error, Aborted | DeadlineExceeded)
    assert response.headers.get("x-should-retry") == ("false" if is_final else None)
    if code == 3040 and not is_openai:
        assert "Capacity temporarily exceeded, please try again." in response.text


async def test_retry_after_says_what_the_error_says_in_whole_seconds() -> None:
    async with serve(ScriptedDispatcher(Script(refuse=Overloaded("full", retry_after_seconds=2.2)))) as gateway:
        assert (await post(gateway, "cloudflare")).headers["retry-after"] == "3"


@pytest.mark.parametrize("failure", [Unavailable("the worker died"), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_failure_in_mid_stream_is_an_event_and_a_cut_connection_without_done(
    endpoint: str, failure: Exception
) -> None:
    script = Script(HELLO, fail_after=2, failure=failure)
    async with serve(ScriptedDispatcher(script)) as gateway:
        path, body = streaming(endpoint)
        received = ""
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            async with gateway.client.stream("POST", path, json=body, headers=HEADERS) as response:
                assert response.status_code == 200
                async for text in response.aiter_text():
                    received += text
        assert all(stream.closed.is_set() for stream in gateway.dispatcher.streams)
    *texts, last = [json.loads(line.removeprefix("data: ")) for line in received.split("\n\n") if line]
    assert texts and "error" in last and "[DONE]" not in received
    if endpoint == "cloudflare":
        assert last["errors"][0]["code"] in (3040, 3043) and last["success"] is False
    if endpoint == "binding":
        assert last["error"]["internalCode"] in (3040, 3043)


async def test_the_openai_sdk_raises_the_error_of_a_broken_stream() -> None:
    script = Script(HELLO, fail_after=2, failure=Unavailable("the worker died"))
    async with (
        serve(ScriptedDispatcher(script)) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError, match="the worker died"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_failure_before_the_end_of_an_unstreamed_answer_is_a_status(endpoint: str) -> None:
    script = Script(HELLO, fail_after=2, failure=Unavailable("the worker died"))
    async with serve(ScriptedDispatcher(script)) as gateway:
        response = await post(gateway, endpoint)
        assert response.status_code == 503
        assert response.headers["x-should-retry"] == "false" and "retry-after" not in response.headers
        assert all(stream.closed.is_set() for stream in gateway.dispatcher.streams)


@pytest.mark.parametrize(
    ("failure", "fail_after"),
    [
        (Unavailable("the worker died"), 2),
        (Overloaded("full"), 2),
        (ZeroDivisionError("a bug"), 2),
        (Unavailable("the worker died"), 0),
    ],
)
async def test_the_openai_sdk_repeats_a_call_only_if_no_token_was_billed(failure: Exception, fail_after: int) -> None:
    script = Script(HELLO, fail_after=fail_after, failure=failure)
    async with (
        serve(ScriptedDispatcher(script)) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=1) as client,
    ):
        gateway.dispatcher.choose = lambda request: script if len(gateway.dispatcher.requests) == 1 else Script(HELLO)
        if fail_after:
            with pytest.raises(openai.APIStatusError):
                await client.chat.completions.create(**CHAT)
        else:
            await client.chat.completions.create(**CHAT)
        assert len(gateway.dispatcher.requests) == (1 if fail_after else 2)


async def test_a_batch_of_prompts_is_not_repeated_once_one_of_them_has_begun() -> None:
    async with serve(ScriptedDispatcher()) as gateway:
        refused = Script(refuse=Overloaded("full"))
        gateway.dispatcher.choose = lambda request: refused if len(gateway.dispatcher.requests) > 1 else Script(HELLO)
        response = await post(gateway, "completions")
        assert (response.status_code, response.headers.get("x-should-retry")) == (429, "false")


@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_client_that_leaves_a_stream_cancels_its_tokens(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, pause_after=2))) as gateway:
        path, body = streaming(endpoint)
        async with gateway.client.stream("POST", path, json=body, headers=HEADERS) as response:
            async for _ in response.aiter_text():
                break
        for stream in gateway.dispatcher.streams:
            await asyncio.wait_for(stream.closed.wait(), 5)
            assert not stream.ended


@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_client_that_does_not_wait_for_a_whole_answer_cancels_its_tokens(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, pause_after=1))) as gateway:
        asking = asyncio.ensure_future(post(gateway, endpoint))
        await gateway.dispatcher.submitted.wait()
        asking.cancel()
        await asyncio.wait({asking})
        for stream in gateway.dispatcher.streams:
            await asyncio.wait_for(stream.closed.wait(), 5)


@pytest.mark.parametrize("endpoint", CALLS)
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_the_queue_is_forgotten(endpoint: str, streamed: bool) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, accept=asyncio.Event()))) as gateway:
        path, body = streaming(endpoint) if streamed else CALLS[endpoint]
        asking = asyncio.ensure_future(gateway.client.post(path, json=body, headers=HEADERS))
        await gateway.dispatcher.submitted.wait()
        asking.cancel()
        await asyncio.wait_for(gateway.dispatcher.submit_cancelled.wait(), 5)
    assert gateway.dispatcher.streams == []


@pytest.mark.parametrize("endpoint", CALLS)
async def test_a_whole_answer_that_takes_too_long_ends_with_a_timeout_that_is_not_repeated(endpoint: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO, pause_after=1)), timeout_seconds=0.2) as gateway:
        response = await post(gateway, endpoint)
        assert all(stream.closed.is_set() for stream in gateway.dispatcher.streams)
    is_openai = endpoint in ("openai", "completions")
    assert response.status_code == (504 if is_openai else 408)
    assert response.headers["x-should-retry"] == "false" and "retry-after" not in response.headers
    assert code_of(endpoint, response.json()) == ("timeout_error" if is_openai else 3007)


async def test_one_refused_prompt_of_several_takes_the_others_with_it() -> None:
    dispatcher = ScriptedDispatcher()
    scripts = iter([Script(HELLO), Script(refuse=Overloaded("full"))])
    dispatcher.choose = lambda request: next(scripts)
    async with serve(dispatcher) as gateway:
        assert (await post(gateway, "completions")).status_code == 429
        assert dispatcher.last.closed.is_set()


@pytest.mark.parametrize("endpoint", CALLS)
@pytest.mark.parametrize(
    ("content", "status", "code", "words"),
    [
        (b'{"prompt": ', 400, 5006, "not valid JSON"),
        (b'{"prompt": "\xff"}', 400, 5006, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', 400, 5006, "not valid JSON"),
        (b"[" * 100_000, 400, 5006, "not valid JSON"),
        (b'{"prompt": NaN}', 400, 5006, "not valid JSON"),
        (b"[1, 2]", 400, 5006, "not an object"),
        (b"  ", 400, 3003, "no body"),
        (b'{"prompt": "' + b"a" * 20_000 + b'"}', 413, 3006, "more than 10,000 bytes"),
    ],
)
async def test_a_body_that_is_no_request_is_explained(
    endpoint: str, content: bytes, status: int, code: int, words: str
) -> None:
    settings = HttpSettings(max_body_bytes=200_000 if content.startswith(b"[[") else 10_000)
    async with serve(settings=settings) as gateway:
        response = await gateway.client.post(CALLS[endpoint][0], content=content, headers=HEADERS)
    assert response.status_code == status and words in response.text
    expected = "invalid_request_error" if endpoint in ("openai", "completions") else code
    assert code_of(endpoint, response.json()) == expected


async def test_malformed_json_is_told_where_it_breaks() -> None:
    async with serve() as gateway:
        response = await gateway.client.post("/v1/completions", content=b'{"prompt": oops}')
    assert "byte 11" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "invalid_request_error"),
        ("GET", "/v1/chat/completions", 405, "invalid_request_error"),
        ("POST", "/client/v4/accounts/me/nothing", 404, 7003),
        ("GET", "/client/v4/accounts/me/ai/run/demo", 405, 7001),
        ("POST", "/ai-gateway/other", 404, 7003),
        ("GET", "/run", 405, 7001),
        ("DELETE", "/healthz", 405, "invalid_request_error"),
    ],
)
async def test_wrong_paths_and_methods_have_the_endpoints_format(
    method: str, path: str, status: int, code: Any
) -> None:
    async with serve() as gateway:
        response = await gateway.client.request(method, path)
    endpoint = (
        "cloudflare" if path.startswith("/client") else "binding" if path.startswith(("/run", "/ai-")) else "openai"
    )
    assert response.status_code == status and code_of(endpoint, response.json()) == code
    assert status == 404 or response.headers["allow"]


@pytest.mark.parametrize("endpoint", CALLS)
async def test_an_unknown_model_is_named(endpoint: str) -> None:
    path, body = CALLS[endpoint]
    async with serve() as gateway:
        response = await gateway.client.post(
            path.replace("demo", "other"), json={**body, "model": "other"} if "model" in body else body,
            headers={"cf-consn-model-id": "other"},
        )  # fmt: skip
    assert response.status_code == (404 if endpoint in ("openai", "completions") else 400)
    assert "no model 'other'; served here: @tandem/demo" in response.text


async def test_a_prompt_of_exactly_the_context_is_answered_and_one_more_is_refused() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), context_length=8) as gateway:
        for length, status in ((7, 200), (8, 200), (9, 400)):
            body = {"model": "demo", "prompt": [5] * length}
            response = await gateway.client.post("/v1/completions", json=body)
            assert response.status_code == status
        assert response.json()["error"]["code"] == "context_length_exceeded"


OF_THE_FLEET = (
    "UNAVAILABLE: failed to connect to all addresses; last error: ipv4:10.0.0.7:50051: Connection refused",
    "the stream to worker decode-0 broke: UNAVAILABLE: Socket closed",
    "worker prefill-host-77 did not answer within 10 s",
    "no KV service answers at /run/tandem/kv.sock: refused",
    "the KV service at kv.internal:7000 ended a watch",
    "the KV service at [fe80::1]:7000 ended a watch",
    "incarnation 5f3e-77 now answers at this address",
)
NAMES = ("10.0.0.7", "50051", "decode-0", "prefill-host", "/run/", "kv.internal", "fe80", "5f3e", "UNAVAILABLE")


@pytest.mark.parametrize("message", OF_THE_FLEET)
@pytest.mark.parametrize("kind", [Unavailable, InternalError, Overloaded, DeadlineExceeded, Aborted, Draining])
def test_errors_of_the_fleet_name_no_address_and_no_worker(kind: type[TandemError], message: str) -> None:
    shown = public_message(kind(message))
    assert shown and not [name for name in NAMES if name in shown]


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("endpoint", CALLS)
async def test_the_log_has_what_clients_do_not_read(endpoint: str, when: str) -> None:
    error = Unavailable(OF_THE_FLEET[0])
    script = Script(HELLO, refuse=error) if when == "before" else Script(HELLO, fail_after=2, failure=error)
    with capture_logs() as logs:
        async with serve(ScriptedDispatcher(script)) as gateway:
            path, body = streaming(endpoint)
            text = await _all_text(gateway, path, body)
    assert "the model's workers cannot take the request now" in text
    assert not [name for name in NAMES if name in text]
    assert OF_THE_FLEET[0] in [line.get("error") for line in logs]


async def _all_text(gateway: Gateway, path: str, body: dict[str, Any]) -> str:
    """Return what a client reads until the answer ends or is cut."""
    pieces = []
    async with gateway.client.stream("POST", path, json=body, headers=HEADERS) as response:
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for piece in response.aiter_text():
                pieces.append(piece)
    return "".join(pieces)


@pytest.mark.parametrize("message", ["no decode worker for 'm' is ready", "the database could not be reached"])
def test_errors_without_names_of_the_fleet_stay_as_they_are(message: str) -> None:
    assert public_message(Unavailable(message)) == message


def test_what_the_client_sent_may_come_back_but_not_all_of_it() -> None:
    assert public_message(InvalidRequest("no model 'http://10.0.0.7:1' here")) == "no model 'http://10.0.0.7:1' here"
    assert len(public_message(InvalidRequest("x" * 100_000))) == 2_003

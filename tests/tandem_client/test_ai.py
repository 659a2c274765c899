"""Tests the results, tokens and errors of `AI`."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tandem_client import (
    AI,
    AuthenticationError,
    DeadlineExceededError,
    NotFoundError,
    RateLimitError,
    StreamTruncated,
    TandemAPIError,
    TandemConnectionError,
    TokenStream,
)
from tandem_client.connection import Connection, retry_delay_seconds
from tandem_client.wire import error_of, stream_event
from tests.tandem_client.stub_gateway import SEAM, USAGE, StubGateway

STREAM = {"prompt": "count", "stream": True}


def stream_of(ai: AI, model: str) -> TokenStream:
    return ai.run(model, {"prompt": "count", "stream": True})


def test_a_result_is_what_the_envelope_carries(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        result = ai.run("@tandem/demo", {"prompt": "hello"})
    assert result == {"response": "You said hello", "usage": USAGE}


def test_account_model_token_and_headers_reach_the_server(gateway: StubGateway) -> None:
    with AI(gateway.url, token="t1", account="acme") as ai:
        ai.run("@cf/meta/llama 8b", {"prompt": "hi"}, extra_headers={"X-Session-Affinity": "s7"})
    [call] = gateway.calls
    assert call.path == "/client/v4/accounts/acme/ai/run/@cf/meta/llama 8b"  # as the server decodes it
    assert call.headers["authorization"] == "Bearer t1"
    assert call.headers["x-session-affinity"] == "s7"
    assert call.body == {"prompt": "hi"}


def test_address_and_token_come_from_the_environment(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BASE_URL", gateway.url + "/")
    monkeypatch.setenv("TANDEM_TOKEN", "from-env")
    with AI() as ai:
        ai.run("@tandem/demo", {"prompt": "hi"})
    assert gateway.calls[0].headers["authorization"] == "Bearer from-env"


def test_no_proxy_stands_before_our_own_machine(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with AI(gateway.url) as ai:
        assert ai.run("@tandem/demo", {"prompt": "hi"})["response"] == "You said hi"


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        AI("127.0.0.1:8642")


def test_models_are_listed(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        assert ai.models() == ["@tandem/demo", "@tandem/other"]


def test_a_stream_gives_tokens_then_usage(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        stream = stream_of(ai, "@tandem/demo")
        assert stream.usage is None
        assert list(stream) == ["One", " two", " three"]
        assert stream.usage == USAGE
        assert stream.finish_reason == "stop"


def test_a_stream_tells_where_its_numerics_class_changed(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        stream, plain = stream_of(ai, "crossing"), stream_of(ai, "@tandem/demo")
        assert stream.seams == [] and list(stream) == ["One two three"] and stream.seams == [SEAM]
        assert list(plain) == ["One", " two", " three"] and plain.seams == []


def test_thinking_is_beside_the_answers_tokens(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        stream, seen = stream_of(ai, "thinking"), list[str]()
        stream.on_thinking(seen.append)
        assert stream.thinking == "" and next(stream) == "One" and seen == ["One, ", "then two."]
        assert "".join(stream) == " two three" and stream.thinking == "One, then two."


def test_tokens_can_be_taken_one_by_one(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, stream_of(ai, "@tandem/demo") as stream:
        assert next(stream) == "One"
        assert list(stream) == [" two", " three"]


def test_openai_shaped_chunks_are_read_too_and_their_increments_are_not_the_usage(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        stream = stream_of(ai, "openai-shaped")
        assert "".join(stream) == "One two"
        assert stream.usage == USAGE


def test_a_stream_tells_which_tools_were_called(gateway: StubGateway) -> None:
    get = {"name": "get", "arguments": {"city": "Oslo"}}
    with AI(gateway.url) as ai:
        native, openai_shaped = stream_of(ai, "calling"), stream_of(ai, "calling-as-openai-does")
        assert list(native) == ["I look."] and native.tool_calls == [get, {"name": "put", "arguments": {}}]
        assert list(openai_shaped) == []
        assert openai_shaped.tool_calls == [get, {"name": "put", "arguments": '{"a": [1'}], "cut short, it is text"


def test_leaving_the_loop_early_closes_the_connection(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        stream = stream_of(ai, "endless")  # held, so that only the loop's end can close it
        for _ in stream:
            break
        assert gateway.client_left.wait(10)
        assert stream.usage is None


def test_leaving_the_with_block_closes_the_connection(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        with stream_of(ai, "endless") as stream:
            next(stream)
        assert gateway.client_left.wait(10)


def test_close_may_come_before_the_first_token_and_twice(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        stream = stream_of(ai, "endless")
        stream.close()
        stream.close()
        assert gateway.client_left.wait(10)


@pytest.mark.parametrize("model", ["truncated", "broken"])
def test_a_stream_without_its_end_raises(gateway: StubGateway, model: str) -> None:
    received = []
    with AI(gateway.url) as ai, pytest.raises(StreamTruncated, match=r"after 1 pieces and without \[DONE\]"):
        for token in stream_of(ai, model):
            received.append(token)
    assert received == ["One"]


def test_an_error_inside_a_stream_raises_with_its_code(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, pytest.raises(RateLimitError) as caught:
        list(stream_of(ai, "failing"))
    assert (caught.value.status, caught.value.code) == (None, 3040)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "kind", "status", "code"),
    [("missing", NotFoundError, 404, 3042), ("locked", AuthenticationError, 401, 10000)],
)
def test_refusals_are_raised_by_run_itself(
    gateway: StubGateway, stream: bool, model: str, kind: type[TandemAPIError], status: int, code: int
) -> None:
    with AI(gateway.url) as ai, pytest.raises(kind) as caught:
        ai.run(model, {"prompt": "x", "stream": stream})
    assert (caught.value.status, caught.value.code) == (status, code)


def test_an_answer_that_is_not_tandems_is_shown(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, pytest.raises(TandemAPIError, match=r"HTTP 502.*Bad Gateway"):
        ai.run("proxy-page", {"prompt": "x"})


def test_a_busy_server_is_asked_again(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai:
        assert ai.run("busy-once", {"prompt": "x"})["response"] == "You said x"
    assert len(gateway.calls) == 2


def test_retries_are_bounded(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, pytest.raises(RateLimitError):
        ai.run("busy", {"prompt": "x"})
    assert len(gateway.calls) == 3


def test_a_stream_is_not_tried_again(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, pytest.raises(RateLimitError):
        stream_of(ai, "busy")
    assert len(gateway.calls) == 1


def test_a_server_that_wants_much_patience_is_left_to_the_caller(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, pytest.raises(RateLimitError) as caught:
        ai.run("busy-for-long", {"prompt": "x"})
    assert caught.value.retry_after == 120.0
    assert len(gateway.calls) == 1


@pytest.mark.parametrize(("drawn", "delay"), [(0.0, 4.0), (1.0, 6.0)])
def test_retry_after_is_obeyed_with_jitter_and_never_undercut(drawn: float, delay: float) -> None:
    error = error_of(429, {"retry-after": "4"}, b"{}")
    assert retry_delay_seconds(error, 1, lambda: drawn) == delay
    assert retry_delay_seconds(error, 3, lambda: drawn) is None


def test_without_retry_after_each_wait_is_twice_as_long() -> None:
    error = error_of(503, {}, b"{}")
    assert [retry_delay_seconds(error, num_tries, lambda: 0.0) for num_tries in (1, 2)] == [0.5, 1.0]


def test_a_call_that_may_have_run_is_not_repeated(gateway: StubGateway) -> None:
    with AI(gateway.url) as ai, pytest.raises(TandemConnectionError, match="may have run") as caught:
        ai.run("cut", {"prompt": "x"})
    assert caught.value.was_sent
    assert len(gateway.calls) == 1


def test_a_call_that_was_never_sent_is_tried_again() -> None:
    refused = httpx.ConnectError("connection refused")
    failed = Connection.resolve(None, None, None).failed(refused)
    assert not failed.was_sent
    assert [retry_delay_seconds(failed, num_tries) is not None for num_tries in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize(("headers", "is_repeated"), [({}, True), ({"x-should-retry": "false"}, False)])
def test_a_call_whose_work_was_billed_is_not_repeated(headers: dict[str, str], is_repeated: bool) -> None:
    assert (retry_delay_seconds(error_of(503, headers, b"{}"), 1) is not None) == is_repeated


@pytest.mark.parametrize("status", [408, 504])
def test_a_call_that_took_longer_than_its_deadline_is_not_repeated(status: int) -> None:
    envelope = b'{"success": false, "errors": [{"code": 3007, "message": "AiError: too long"}]}'
    error = error_of(status, {}, envelope if status == 408 else b'{"error": {"message": "too long"}}')
    assert isinstance(error, DeadlineExceededError) and not error.may_repeat
    assert retry_delay_seconds(error, 1) is None
    with pytest.raises(DeadlineExceededError):
        stream_event(json.dumps({"errors": [{"code": 3007, "message": "AiError: too long"}]}))


def test_nobody_listening_is_a_connection_error() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with AI(f"http://127.0.0.1:{unheard.getsockname()[1]}") as ai, pytest.raises(TandemConnectionError):
            stream_of(ai, "@tandem/demo")

"""Tests an ordinary Worker in stock workerd over the binding protocol: answers, streams, refusals, disconnects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.examples.stub_binding import USAGE, StubBinding
from tests.examples.workerd import example_worker
from tests.tandem_client.serving import serve

pytestmark = pytest.mark.services

MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Harness:
    """A Worker and its gateway."""

    gateway: StubBinding
    worker: httpx.Client


@pytest.fixture
def harness() -> Iterator[Harness]:
    gateway = StubBinding()
    with (
        serve(gateway.app()) as url,
        example_worker(url.removeprefix("http://")) as worker_url,
        httpx.Client(base_url=worker_url, trust_env=False, timeout=20) as worker,
    ):
        yield Harness(gateway, worker)


def test_the_page_is_html(harness: Harness) -> None:
    page = harness.worker.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")


def test_a_whole_answer_is_the_models_object(harness: Harness) -> None:
    answer = harness.worker.get("/run", params={"prompt": "hello", "max_tokens": 5})
    assert answer.json() == {"response": "You said hello", "usage": USAGE}
    [call] = harness.gateway.calls
    assert call == {"model": "@tandem/demo", "inputs": {"prompt": "hello", "max_tokens": 5}, "options": {}}


def test_a_streamed_answer_arrives_event_by_event_and_unchanged(harness: Harness) -> None:
    with harness.worker.stream("POST", "/chat", json={"messages": MESSAGES}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == "One two three"
    assert json.loads(events[-2])["usage"] == USAGE
    assert events[-1] == "[DONE]"
    assert harness.gateway.calls[0]["inputs"] == {"messages": MESSAGES, "stream": True}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_reaches_the_browser_with_its_code_and_status(harness: Harness, streamed: bool) -> None:
    if streamed:
        answer = harness.worker.post("/chat", json={"messages": MESSAGES, "model": "busy"})
    else:
        answer = harness.worker.get("/run", params={"prompt": "x", "model": "busy"})
    assert answer.status_code == 429
    assert answer.json() == {
        "error": "3040: Capacity temporarily exceeded, please try again.",
        "name": "InferenceUpstreamError",
        "code": 3040,
    }


def test_a_body_that_is_no_json_is_the_callers_mistake(harness: Harness) -> None:
    assert harness.worker.post("/chat", content=b"{").status_code == 400
    assert harness.worker.get("/nowhere").status_code == 404


def test_a_stream_that_breaks_off_upstream_breaks_off_downstream(harness: Harness) -> None:
    received = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        harness.worker.stream("POST", "/chat", json={"messages": MESSAGES, "model": "broken"}) as answer,
    ):
        for chunk in answer.iter_raw():
            received += chunk
    assert b"three" in received and b"[DONE]" not in received


def test_a_browser_that_leaves_in_mid_stream_is_seen_by_the_gateway(harness: Harness) -> None:
    with harness.worker.stream("POST", "/chat", json={"messages": MESSAGES, "model": "endless"}) as answer:
        assert b"more" in next(answer.iter_raw())
    assert harness.gateway.client_left.wait(20)


def test_a_browser_that_leaves_before_the_first_token_is_seen_with_it(harness: Harness) -> None:
    """Stock workerd notices a closed connection only when it sends, which is with the first token."""
    body = {"messages": MESSAGES, "model": "slow-endless"}
    with pytest.raises(httpx.ReadTimeout):
        harness.worker.post("/chat", json=body, timeout=httpx.Timeout(20, read=0.5))
    assert harness.gateway.called.is_set()
    harness.gateway.go_on.set()
    assert harness.gateway.client_left.wait(20)


def test_a_gateway_that_is_not_there_is_an_error_not_a_wait() -> None:
    with (
        example_worker("127.0.0.1:9") as worker_url,
        httpx.Client(base_url=worker_url, trust_env=False, timeout=20) as worker,
    ):
        answer = worker.get("/run")
    assert answer.status_code == 502
    assert "Network connection lost" in answer.json()["error"]

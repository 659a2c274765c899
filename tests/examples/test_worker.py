"""Does an ordinary Worker in stock workerd work over the binding protocol: streamed, whole, refused, and left?"""

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
class World:
    """A Worker before a gateway."""

    gateway: StubBinding
    worker: httpx.Client


@pytest.fixture
def world() -> Iterator[World]:
    gateway = StubBinding()
    with (
        serve(gateway.app()) as url,
        example_worker(url.removeprefix("http://")) as worker_url,
        httpx.Client(base_url=worker_url, trust_env=False, timeout=20) as worker,
    ):
        yield World(gateway, worker)


def test_the_page_is_html(world: World) -> None:
    page = world.worker.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")


def test_a_whole_answer_is_the_models_object(world: World) -> None:
    answer = world.worker.get("/run", params={"prompt": "hello", "max_tokens": 5})
    assert answer.json() == {"response": "You said hello", "usage": USAGE}
    [call] = world.gateway.calls
    assert call == {"model": "@tandem/demo", "inputs": {"prompt": "hello", "max_tokens": 5}, "options": {}}


def test_a_streamed_answer_arrives_event_by_event_and_unchanged(world: World) -> None:
    with world.worker.stream("POST", "/chat", json={"messages": MESSAGES}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == "One two three"
    assert json.loads(events[-2])["usage"] == USAGE
    assert events[-1] == "[DONE]"
    assert world.gateway.calls[0]["inputs"] == {"messages": MESSAGES, "stream": True}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_reaches_the_browser_with_its_code_and_status(world: World, streamed: bool) -> None:
    if streamed:
        answer = world.worker.post("/chat", json={"messages": MESSAGES, "model": "busy"})
    else:
        answer = world.worker.get("/run", params={"prompt": "x", "model": "busy"})
    assert answer.status_code == 429
    assert answer.json() == {
        "error": "3040: Capacity temporarily exceeded, please try again.",
        "name": "InferenceUpstreamError",
        "code": 3040,
    }


def test_a_body_that_is_no_json_is_the_callers_mistake(world: World) -> None:
    assert world.worker.post("/chat", content=b"{").status_code == 400
    assert world.worker.get("/nowhere").status_code == 404


def test_a_stream_that_breaks_off_upstream_breaks_off_downstream(world: World) -> None:
    received = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        world.worker.stream("POST", "/chat", json={"messages": MESSAGES, "model": "broken"}) as answer,
    ):
        for chunk in answer.iter_raw():
            received += chunk
    assert b"three" in received and b"[DONE]" not in received


def test_a_browser_that_leaves_in_mid_stream_is_seen_by_the_gateway(world: World) -> None:
    with world.worker.stream("POST", "/chat", json={"messages": MESSAGES, "model": "endless"}) as answer:
        assert b"more" in next(answer.iter_raw())
    assert world.gateway.client_left.wait(20)


def test_a_browser_that_leaves_before_the_first_token_is_seen_with_it(world: World) -> None:
    """Stock workerd watches no browser it has nothing to send to; the first tokens tell it."""
    body = {"messages": MESSAGES, "model": "slow-endless"}
    with pytest.raises(httpx.ReadTimeout):
        world.worker.post("/chat", json=body, timeout=httpx.Timeout(20, read=0.5))
    assert world.gateway.asked.is_set()
    world.gateway.go_on.set()
    assert world.gateway.client_left.wait(20)


def test_a_gateway_that_is_not_there_is_an_error_not_a_wait() -> None:
    with (
        example_worker("127.0.0.1:9") as worker_url,
        httpx.Client(base_url=worker_url, trust_env=False, timeout=20) as worker,
    ):
        answer = worker.get("/run")
    assert answer.status_code == 502
    assert "Network connection lost" in answer.json()["error"]

"""An operator can see the fleet, and follow one request."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem_runtime import tracing
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello world"), 1]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(tracing, "tracer", lambda: tracer)
    yield exporter


async def test_health_is_not_readiness() -> None:
    async with serve() as gateway:
        assert (await gateway.client.get("/healthz")).status_code == 200
        assert (await gateway.client.get("/readyz")).json()["ready"] is True
        gateway.readiness.answer = (False, {"reason": "no request has gone through yet"})
        unready = await gateway.client.get("/readyz")
        assert (await gateway.client.get("/healthz")).status_code == 200
    assert unready.status_code == 503 and unready.json() == {"ready": False}


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_readiness_is_where_load_generators_look(path: str) -> None:
    async with serve() as gateway:
        assert (await gateway.client.get(path)).status_code == 200
        gateway.readiness.answer = (False, {"reason": "no request has gone through yet"})
        unready = await gateway.client.get(path)
    assert (unready.status_code, unready.json()) == (503, {"ready": False})


async def test_a_probe_may_ask_for_one_model() -> None:
    async with serve() as gateway:
        for path in ("/readyz", "/readyz?model=@tandem/demo", "/health?model=a%2Fb"):
            assert (await gateway.client.get(path)).json() == {"ready": True}
    assert gateway.readiness.models == ["", "@tandem/demo", "a/b"]


async def test_the_version_is_that_of_the_package() -> None:
    async with serve() as gateway:
        assert (await gateway.client.get("/version")).json() == {"version": importlib.metadata.version("tandem-serve")}


async def test_the_fleet_is_a_list() -> None:
    async with serve() as gateway:
        fleet = (await gateway.client.get("/v1/workers")).json()
    assert fleet["object"] == "list" and fleet["data"][0]["worker_id"] == "prefill-0"


async def test_the_landing_page_has_a_line_to_paste() -> None:
    async with serve(model_id="<b>odd</b>") as gateway:
        page = await gateway.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert f"curl -N {gateway.url}/client/v4/" in page.text and "<b>odd" not in page.text


async def test_every_answer_has_an_id_of_its_own() -> None:
    async with serve() as gateway:
        ids = {(await gateway.client.get(path)).headers["cf-ai-req-id"] for path in ("/healthz", "/v1/models", "/none")}
    assert len(ids) == 3


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = [span for span in spans.get_finished_spans() if span.name == name]
    return span


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_of_the_callers_trace_with_tokenize_below_it(
    spans: InMemorySpanExporter, stream: bool
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with serve(ScriptedDispatcher(Script(HELLO, num_cached_tokens=1))) as gateway:
        body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    server, tokenize = named(spans, "chat demo"), named(spans, "tokenize")
    assert server.context and tokenize.parent and tokenize.parent.span_id == server.context.span_id
    assert f"{server.context.trace_id:032x}" == trace_id
    attributes = dict(server.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat" and attributes["gen_ai.request.model"] == "demo"
    assert attributes["gen_ai.response.model"] == "@tandem/demo"
    assert attributes["gen_ai.usage.output_tokens"] == len(HELLO)
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",) and attributes["http.response.status_code"] == 200

"""Tests that `AsyncAI` behaves as `AI`."""

from __future__ import annotations

import asyncio

import pytest

from tandem_client import AsyncAI, NotFoundError, RateLimitError, StreamTruncated
from tests.tandem_client.stub_gateway import SEAM, USAGE, StubGateway


async def test_a_result_is_what_the_envelope_carries(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        result = await ai.run("@tandem/demo", {"prompt": "hello"})
        assert result == {"response": "You said hello", "usage": USAGE}
        assert await ai.models() == ["@tandem/demo", "@tandem/other"]


async def test_a_stream_gives_tokens_then_usage(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        stream = await ai.run("@tandem/demo", {"prompt": "count", "stream": True})
        assert await anext(stream) == "One"
        assert [token async for token in stream] == [" two", " three"]
        assert stream.usage == USAGE


async def test_a_stream_tells_where_its_numerics_class_changed(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        stream = await ai.run("crossing", {"prompt": "count", "stream": True})
        assert [token async for token in stream] == ["One two three"] and stream.seams == [SEAM]


async def test_thinking_is_beside_the_answers_tokens(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        stream, seen = await ai.run("thinking", {"prompt": "count", "stream": True}), list[str]()
        stream.on_thinking(seen.append)
        assert [token async for token in stream] == ["One", " two", " three"]
        assert seen == ["One, ", "then two."] and stream.thinking == "One, then two."


async def test_many_streams_run_at_once(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:

        async def answer() -> str:
            stream = await ai.run("@tandem/demo", {"prompt": "count", "stream": True})
            return "".join([token async for token in stream])

        assert await asyncio.gather(*(answer() for _ in range(32))) == ["One two three"] * 32


async def test_leaving_the_loop_early_closes_the_connection(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        stream = await ai.run("endless", {"prompt": "count", "stream": True})
        async for _ in stream:
            break
        assert await asyncio.to_thread(gateway.client_left.wait, 10)


async def test_cancelling_the_reader_closes_the_connection(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in await ai.run("endless", {"prompt": "count", "stream": True}):
                started.set()

        reader = asyncio.create_task(read())
        await started.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(gateway.client_left.wait, 10)


async def test_aclose_may_come_before_the_first_token(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        async with await ai.run("endless", {"prompt": "count", "stream": True}):
            pass
        assert await asyncio.to_thread(gateway.client_left.wait, 10)


@pytest.mark.parametrize("model", ["truncated", "broken"])
async def test_a_stream_without_its_end_raises(gateway: StubGateway, model: str) -> None:
    async with AsyncAI(gateway.url) as ai:
        stream = await ai.run(model, {"prompt": "count", "stream": True})
        with pytest.raises(StreamTruncated):
            assert [token async for token in stream]


async def test_errors_are_raised_before_and_inside_a_stream(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        with pytest.raises(NotFoundError):
            await ai.run("missing", {"prompt": "x", "stream": True})
        stream = await ai.run("failing", {"prompt": "x", "stream": True})
        with pytest.raises(RateLimitError):
            assert [token async for token in stream]


async def test_a_busy_server_is_asked_again_within_bounds(gateway: StubGateway) -> None:
    async with AsyncAI(gateway.url) as ai:
        assert (await ai.run("busy-once", {"prompt": "x"}))["response"] == "You said x"
        with pytest.raises(RateLimitError):
            await ai.run("busy", {"prompt": "x"})
    assert len(gateway.calls) == 2 + 3

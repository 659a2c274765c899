"""What a request leaves is freed when it ends: a cycle would stay until a collection, which stops every stream."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.control_plane.api.gateway import serve
from tests.control_plane.api.http.raw_client import until
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
RUN = "/client/v4/accounts/a/ai/run/@tandem/demo"
OURS = ("control_plane", "tandem_runtime", "uvicorn")
OF_STREAMS = ("control_plane.api.http", "control_plane.explain.timeline", "uvicorn")
"""Left by a stream: anyio keeps the error of a cancelled task in a cycle, with the response that it belonged to."""


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Count what of ours only a collection would free, by type, when the block has ended."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        found.update(name for name in names if name.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "n": 4}, 200),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("/v1/completions", {"model": "demo", "prompt": ["a", "b", "c"]}, 200),
        ("/v1/completions", {"model": "demo", "prompt": ["a", "b", "c"], "stream": True}, 200),
        (RUN, {"prompt": "hi"}, 200),
        (RUN, {"prompt": "hi", "stream": True}, 200),
        ("/v1/chat/completions", {**CHAT, "messages": 7}, 400),
        ("/v1/chat/completions", {**CHAT, "model": "nobody's"}, 404),
    ],
)
async def test_a_request_leaves_no_cycle(path: str, body: Mapping[str, Any], status: int) -> None:
    async with serve(ScriptedDispatcher(Script([*ids_of("Hello world"), 1]))) as gateway:

        async def ask() -> None:
            assert (await gateway.client.post(path, json=body)).status_code == status

        await ask()  # what is made once
        gateway.dispatcher.requests.clear()
        with garbage() as found:
            for _ in range(3):
                await ask()
            gateway.dispatcher.requests.clear()
        left = {name for name in found if not (body.get("stream") and name.startswith(OF_STREAMS))}
        assert left == set()


async def test_a_connection_that_is_closed_leaves_no_cycle() -> None:
    async with serve(ScriptedDispatcher(Script([*ids_of("Hello world"), 1]))) as gateway:

        async def ask() -> None:
            answer = await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"connection": "close"})
            assert answer.status_code == 200
            await until(lambda: not any(gateway.connections.counts.values()))

        await ask()
        with garbage() as found:
            for _ in range(3):
                await ask()
        assert found == {}

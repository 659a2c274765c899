"""Decode stops for a client that has left, by the engine's own count of tokens."""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec
import psutil
import pytest

from tandem_engine.settings import EngineConfig
from tests.system.bit_flips import engine_pid
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL, client

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: dict[str, Any] = {"stream": True, "max_tokens": 900, "ignore_eos": True, "seed": 9}
[DRAFTS] = [each.default for each in msgspec.structs.fields(EngineConfig) if each.name == "max_draft_tokens"]
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "openai": ("/v1/completions", {"model": MODEL, "prompt": "Once", **ASK}, {}),
    "rest": (f"/client/v4/accounts/test/ai/run/{MODEL}", {"prompt": "Once", "raw": True, **ASK}, {}),
    "binding": ("/run", {"inputs": {"prompt": "Once", "raw": True, **ASK}}, {"cf-consn-model-id": MODEL}),
}


@pytest.mark.parametrize("face", CALLS)
async def test_an_engine_generates_at_most_the_step_that_it_is_in_when_a_client_leaves(
    demo_fleet: Fleet, face: str
) -> None:
    path, body, headers = CALLS[face]
    engine = engine_pid(demo_fleet.services["decode-0"].process.pid)

    async def tokens_and_steps() -> tuple[float, float]:
        counters = (await demo_fleet.stats("decode-0")).counters
        return counters["tokens_generated"], counters["steps"]

    async def of_a_stopped_engine() -> tuple[float, float]:
        """Return the counters once the worker's front has read all that the engine sent before it stopped."""
        await until(lambda: psutil.Process(engine).status() == psutil.STATUS_STOPPED, 20)
        reads = [await tokens_and_steps()]

        async def are_equal() -> bool:
            reads.append(await tokens_and_steps())
            return reads[-1] == reads[-2]

        await until(are_equal, 20)
        return reads[-1]

    # 1. A client reads a few tokens of many, and the engine is stopped where it is: in a step, or between two.
    async with (
        client(demo_fleet.base_url) as http,
        http.stream("POST", path, json=body, headers=headers) as response,
    ):
        lines = response.aiter_lines()
        for _ in range(8):
            await anext(lines)
        os.kill(engine, signal.SIGSTOP)
        try:
            at_stop, steps_at_stop = await of_a_stopped_engine()
            await response.aclose()  # 2. The client leaves, and not one more token can tell the gateway so.
            running = demo_fleet.gateway.dispatcher.router.in_flight
            await until(lambda: running.total() == 0, 20)
            await tokens_and_steps()  # the worker's front has heard what was sent to it before
        finally:
            os.kill(engine, signal.SIGCONT)  # 3. The engine ends its step, and finds the cancel.
    await demo_fleet.pools_are_full()
    assert at_stop < 900, "the answer had not ended by itself"
    generated, steps = await tokens_and_steps()
    assert steps - steps_at_stop <= 1
    assert generated - at_stop <= 1 + DRAFTS, "a step's token, and guesses that were right"

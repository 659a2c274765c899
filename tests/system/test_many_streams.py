"""Many clients, some of whom leave, get right answers and leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.system.fleet import Fleet, until
from tests.system.streams import client, run, stream, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "under",
    "cold",
    "grey",
    "skies",
    "near",
    "old",
    "mills",
]


async def test_blocks_return_to_every_pool_when_a_third_of_64_clients_leave(demo_fleet: Fleet) -> None:
    chance = random.Random(1)

    async def one(http: object, index: int) -> tuple[bool, str]:
        prompt = " ".join(chance.choices(WORDS, k=chance.choice([2, 20, 90, 250])))
        inputs = {"prompt": prompt, "raw": True, "max_tokens": chance.choice([1, 8, 40]), "seed": index + 1}
        leave_after = chance.randrange(6) if index % 3 == 0 else None
        events = await stream(http, inputs, leave_after=leave_after)  # type: ignore[arg-type]
        return leave_after is None, text_of(events)

    async with client(demo_fleet.base_url) as http:
        answers = await asyncio.gather(*(one(http, index) for index in range(64)))
        assert sum(is_whole for is_whole, _ in answers) == 42
        await demo_fleet.pools_are_full()


async def test_a_stream_says_what_the_whole_answer_says(demo_fleet: Fleet) -> None:
    inputs = {"prompt": "What is a KV cache?", "seed": 3, "max_tokens": 40}
    async with client(demo_fleet.base_url) as http:
        whole, events = await run(http, inputs), await stream(http, inputs)
    assert text_of(events) == whole["response"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("stage", ["queued", "prefilling", "between", "decoding"])
async def test_a_client_may_leave_at_any_stage(demo_fleet: Fleet, stage: str) -> None:
    """Left before the first event, during it, right after it, and later; nothing is kept anywhere."""
    prompt = " ".join(random.Random(2).choices(WORDS, k=300))
    inputs = {"prompt": prompt, "raw": True, "max_tokens": 200, "seed": 5}
    async with client(demo_fleet.base_url) as http:
        if stage in ("queued", "prefilling"):
            task = asyncio.create_task(stream(http, inputs))
            running = demo_fleet.gateway.dispatcher.router.in_flight
            if stage == "prefilling":
                await until(lambda: running.prefill_tokens.total() > 0, 10)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await stream(http, inputs, leave_after=1 if stage == "between" else 5)
        await demo_fleet.pools_are_full()
        assert not demo_fleet.gateway.dispatcher.router.in_flight.decode_tokens

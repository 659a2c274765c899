"""Many clients, some of whom leave, get right answers and leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from control_plane.routing.cost_model import InFlightEntry
from tests.system.fleet import Fleet
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
async def test_a_client_may_leave_at_any_stage(demo_fleet: Fleet, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left before the first event, during it, right after it, and later; nothing is kept anywhere."""
    prompt = " ".join(random.Random(stage).choices(WORDS, k=300))  # no stage finds the KV of another
    inputs = {"prompt": prompt, "raw": True, "max_tokens": 200, "seed": 5}
    async with client(demo_fleet.base_url) as http:
        if stage in ("queued", "prefilling"):
            prefills = asyncio.Event()
            in_flight = demo_fleet.gateway.dispatcher.router.in_flight
            add = in_flight.add

            def watched_add(incarnation: str, *, num_prefill_tokens: int = 0, **others: int) -> InFlightEntry:
                if num_prefill_tokens > 0:
                    prefills.set()
                return add(incarnation, num_prefill_tokens=num_prefill_tokens, **others)

            monkeypatch.setattr(in_flight, "add", watched_add)
            task = asyncio.create_task(stream(http, inputs))
            if stage == "prefilling":
                await asyncio.wait_for(prefills.wait(), 10)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await stream(http, inputs, leave_after=1 if stage == "between" else 5)
        await demo_fleet.pools_are_full()
        assert not demo_fleet.gateway.dispatcher.router.in_flight.decode_tokens

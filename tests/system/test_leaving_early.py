"""Real engines report what they computed for a client that leaves before its first token."""

from __future__ import annotations

import asyncio

import pytest

from tests.system.fleet import Fleet, token_request, until
from tests.system.streams import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [7 + position % 200 for position in range(1800)]


@pytest.mark.parametrize("prefill", ["prefill-0", None], ids=["handed over", "aggregated"])
async def test_who_leaves_in_the_middle_of_a_prompt_pays_for_what_was_computed(
    demo_fleet: Fleet, prefill: str | None
) -> None:
    computes = prefill or "decode-0"
    await demo_fleet.proven()  # the gateway's own probe is over: it would be counted, too
    await demo_fleet.handed_over(MODEL, "prefill-0", "decode-0")
    await demo_fleet.pools_are_full()
    before = (await demo_fleet.stats(computes)).counters["prompt_tokens_computed"]

    async def has_begun() -> bool:
        return (await demo_fleet.stats(computes)).counters["prompt_tokens_computed"] > before

    request = token_request(MODEL, PROMPT, 4, cacheable=False)
    stream = await demo_fleet.dispatcher("decode-0", prefill).submit(request)
    await until(has_begun, 30)
    await stream.aclose()
    num_tokens = await asyncio.wait_for(stream.num_unfinished_tokens(), 30)
    assert 0 < num_tokens <= len(PROMPT)
    await demo_fleet.pools_are_full()
    after = (await demo_fleet.stats(computes)).counters["prompt_tokens_computed"]
    assert num_tokens == after - before, "as the engine itself counts"

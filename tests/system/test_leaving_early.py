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
    before = await num_computed(demo_fleet)
    now = before

    async def has_begun() -> bool:
        nonlocal now
        now = await num_computed(demo_fleet)
        return now != before

    request = token_request(MODEL, PROMPT, 4, cacheable=False)
    stream = await demo_fleet.dispatcher("decode-0", prefill).submit(request)
    await until(has_begun, 30, lambda: f"{before}, {now}\n{demo_fleet.tails(demo_fleet.services)}")
    assert now[computes] > before[computes], f"{before}, {now}\n{demo_fleet.tails(demo_fleet.services)}"
    await stream.aclose()
    num_tokens = await asyncio.wait_for(stream.num_unfinished_tokens(), 30)
    assert 0 < num_tokens <= len(PROMPT)
    await demo_fleet.pools_are_full()
    after = await num_computed(demo_fleet)
    assert num_tokens == sum(after.values()) - sum(before.values()), "as the engines themselves count"


async def num_computed(fleet: Fleet) -> dict[str, float]:
    """Return the prompt tokens that each worker has computed."""
    names = "prefill-0", "decode-0"
    return {name: (await fleet.stats(name)).counters["prompt_tokens_computed"] for name in names}

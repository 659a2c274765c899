"""Do prompts find their beginnings in the host's store: after their worker has died, and in a chat's next turn?"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.flight import Flight
from tandem.v1 import types_pb2 as pb
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
NUM_TOKENS = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("prompt-cache")) as fleet:
        fleet.start("kv", "kv-0")
        _start_workers(fleet, checkpoint, "0")
        await fleet.ready()
        yield fleet


def _start_workers(fleet: Fleet, checkpoint: Callable[[str], Path], name: str) -> None:
    for role in ("prefill", "decode"):
        fleet.start(role, f"{role}-{name}", "--model", str(checkpoint("llama")), *SMALL)


async def run(fleet: Fleet, prompt: list[int], num_tokens: int = NUM_TOKENS, account: str = "test") -> Flight:
    request = token_request("tiny-llama", prompt, num_tokens, account=account)
    flight = await fleet.gateway.dispatcher.submit(request)
    async for _ in flight:
        pass
    return flight


async def published(fleet: Fleet, num_blocks: int) -> None:
    """Wait until the host's store has that many blocks."""

    async def are_there() -> bool:
        return (await fleet.stats("kv-0")).kv_service.store.num_blocks >= num_blocks

    await until(are_there, 20)


def prefill_ledger(flight: Flight) -> pb.PhaseLedger:
    ledger = flight.prefill_ledger
    assert ledger is not None, "prefill has reported"
    return ledger


async def test_a_prompt_outlives_the_workers_that_computed_it(fleet: Fleet, checkpoint: Callable[[str], Path]) -> None:
    prompt = clear_prompt(checkpoint("llama"), 70, NUM_TOKENS)
    expected = greedy(checkpoint("llama"), prompt, NUM_TOKENS)
    # 1. Computed once, with the answer's blocks published by decode.
    assert (await run(fleet, prompt)).choices[0].tokens == expected
    num_full_blocks = (70 + NUM_TOKENS - 1) // BLOCK
    await published(fleet, num_full_blocks)
    # 2. Both workers die, and others take their place: their pools are empty.
    for worker_id in ("prefill-0", "decode-0"):
        fleet.services[worker_id].kill(signal.SIGKILL)
        await fleet.ended(fleet.services.pop(worker_id))
    _start_workers(fleet, checkpoint, "1")
    await fleet.ready()
    # 3. The prompt again: its full blocks come from the store.
    flight = await run(fleet, prompt)
    assert flight.choices[0].tokens == expected
    ledger = prefill_ledger(flight)
    assert (ledger.num_loaded_tokens, ledger.num_cached_tokens, ledger.num_computed_tokens) == (64, 64, 6)
    assert flight.usage.num_cached_tokens == 64
    # 4. The next turn of the chat: what decode answered is there too.
    turn = [*prompt, *expected, 5, 6, 7]
    flight = await run(fleet, turn, 1)
    assert flight.choices[0].tokens == greedy(checkpoint("llama"), turn, 1)
    assert prefill_ledger(flight).num_cached_tokens == num_full_blocks * BLOCK
    # 5. Another account finds nothing.
    flight = await run(fleet, prompt, 1, account="another")
    assert prefill_ledger(flight).num_cached_tokens == 0
    await fleet.pools_are_full()


async def test_a_choice_that_moves_takes_its_cache_from_the_store(
    fleet: Fleet, checkpoint: Callable[[str], Path]
) -> None:
    prompt = clear_prompt(checkpoint("llama"), 90, NUM_TOKENS)
    expected = greedy(checkpoint("llama"), prompt, NUM_TOKENS)
    before = (await fleet.stats("kv-0")).kv_service.store.num_blocks
    fleet.start("decode", "decode-2", "--model", str(checkpoint("llama")), *SMALL)
    await fleet.ready()
    request = token_request("tiny-llama", prompt, NUM_TOKENS, account="mover")  # nobody else's blocks are found
    flight = await fleet.gateway.dispatcher.submit(request)
    deltas = aiter(flight)
    tokens: list[int] = []
    while len(tokens) < 24:
        tokens += (await anext(deltas)).token_ids
    await published(fleet, before + (90 + 8) // BLOCK)
    leg = flight.choices[0].leg
    assert leg is not None
    dead = leg.link.worker.worker_id
    fleet.services[dead].kill(signal.SIGKILL)
    await fleet.ended(fleet.services.pop(dead))
    async for delta in deltas:
        tokens += delta.token_ids
    assert tokens == expected
    assert flight.choices[0].ledger is not None
    assert flight.choices[0].ledger.num_loaded_tokens >= 80, "most of the prompt came from the store"

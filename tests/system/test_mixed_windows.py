"""A model with sliding windows in some layers goes through the whole system, in several block groups."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
NUM_GROUPS = 6  # one of the layer that sees all, and five of the others
NUM_PROMPT, NUM_TOKENS = 100, 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("mixed-windows")) as fleet:
        fleet.start("kv", "kv-a", "--host-id", "host-a")
        fleet.start("kv", "kv-b", "--host-id", "host-b")
        start(fleet, checkpoint, "prefill", "prefill-a", "host-a")
        start(fleet, checkpoint, "decode", "decode-a", "host-a")
        start(fleet, checkpoint, "decode", "decode-grpc", "host-a", "--kv-transport", "grpc")
        start(fleet, checkpoint, "decode", "decode-b", "host-b")
        await fleet.ready()
        yield fleet


def start(fleet: Fleet, checkpoint: Callable[[str], Path], role: str, name: str, host: str, *flags: str) -> None:
    model = ("--model", str(checkpoint("gemma3")), *SMALL, "--max-num-batched-tokens", "64")
    fleet.start(role, name, "--host-id", host, *model, *flags)


async def run(
    fleet: Fleet, decode: str, prefill: str, prompt: list[int], account: str, num_tokens: int
) -> RequestStream:
    request = token_request("tiny-gemma3", prompt, num_tokens, account=account)
    stream = await fleet.dispatcher(decode, prefill).submit(request)
    async for _ in stream:
        pass
    return stream


@pytest.mark.parametrize("decode", ["decode-a", "decode-grpc", "decode-b"])
async def test_of_windows_only_what_the_answer_sees_is_handed_over(
    fleet: Fleet, checkpoint: Callable[[str], Path], decode: str
) -> None:
    prompt = clear_prompt(checkpoint("gemma3"), NUM_PROMPT, NUM_TOKENS)
    stream = await run(fleet, decode, "prefill-a", prompt, decode, NUM_TOKENS)
    assert stream.state.choices[0].tokens == greedy(checkpoint("gemma3"), prompt, NUM_TOKENS)
    ledger, bytes_per_block = stream.state.choices[0].ledger, (await fleet.stats(decode)).kv.bytes_per_block
    assert ledger is not None
    assert ledger.num_computed_tokens == ledger.num_reprefill_tokens == 0
    # The token that follows sees those from 85 on: of seven blocks the last two.
    assert ledger.num_bytes_pulled == (7 + (NUM_GROUPS - 1) * 2) * bytes_per_block
    await fleet.pools_are_full()


async def test_a_prompt_is_found_in_the_store_and_so_is_its_answer(
    fleet: Fleet, checkpoint: Callable[[str], Path]
) -> None:
    prompt = clear_prompt(checkpoint("gemma3"), NUM_PROMPT, NUM_TOKENS, first_seed=1000)
    expected = greedy(checkpoint("gemma3"), prompt, NUM_TOKENS)
    num_full_blocks = (NUM_PROMPT + NUM_TOKENS - 1) // BLOCK

    async def num_stored() -> int:
        return int((await fleet.stats("kv-a")).kv_service.store.num_blocks)

    # 1. Computed once; prompt and answer are published, each group's blocks.
    before = await num_stored()
    assert (await run(fleet, "decode-a", "prefill-a", prompt, "stored", NUM_TOKENS)).state.choices[0].tokens == expected

    async def are_there() -> bool:
        return await num_stored() == before + NUM_GROUPS * num_full_blocks

    await until(are_there, 20)
    # 2. Both workers die, and others take their place: their pools are empty.
    for name in ("prefill-a", "decode-a"):
        fleet.services[name].kill(signal.SIGKILL)
        await fleet.ended(fleet.services.pop(name))
    start(fleet, checkpoint, "prefill", "prefill-c", "host-a")
    start(fleet, checkpoint, "decode", "decode-c", "host-a")
    await fleet.ready()
    # 3. The prompt again, and the chat's next turn: what is full comes from the store.
    stream = await run(fleet, "decode-c", "prefill-c", prompt, "stored", NUM_TOKENS)
    assert stream.state.choices[0].tokens == expected
    ledger = stream.state.prefill_ledger
    assert ledger is not None
    assert (ledger.num_loaded_tokens, ledger.num_cached_tokens, ledger.num_computed_tokens) == (96, 96, 4)
    turn = [*prompt, *expected, 5, 6, 7]
    stream = await run(fleet, "decode-c", "prefill-c", turn, "stored", 4)
    assert stream.state.choices[0].tokens == greedy(checkpoint("gemma3"), turn, 4)
    assert stream.state.prefill_ledger is not None
    assert stream.state.prefill_ledger.num_cached_tokens == num_full_blocks * BLOCK
    await fleet.pools_are_full()

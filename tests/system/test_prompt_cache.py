"""Prompts find their prefix in the host's store: after their worker has died, in a chat's next turn, per account."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from tandem.v1 import types_pb2 as pb
from tests.checkpoints import byte_level_tokenizer
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
NUM_TOKENS = 40
PUBLIC = "You help people who call a bank. Never name a sum; ask for their city first."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("prompt-cache")
    (folder / "bank.txt").write_text(f"{PUBLIC}\n")
    async with Fleet(folder, public_prefixes=folder, prompt_cache_accounts=("silent=off",)) as fleet:
        fleet.start("kv", "kv-0")
        _start_workers(fleet, checkpoint, "0")
        await fleet.ready()
        yield fleet


def _start_workers(fleet: Fleet, checkpoint: Callable[[str], Path], name: str) -> None:
    for role in ("prefill", "decode"):
        fleet.start(role, f"{role}-{name}", "--model", str(checkpoint("llama")), *SMALL)


async def run(fleet: Fleet, prompt: list[int], num_tokens: int = NUM_TOKENS, account: str = "test") -> RequestStream:
    request = token_request("tiny-llama", prompt, num_tokens, account=account)
    stream = await fleet.gateway.dispatcher.submit(request)
    async for _ in stream:
        pass
    return stream


async def cached_tokens(fleet: Fleet, account: str, prompt: list[int] | str, **fields: Any) -> int:
    """Ask as a client of that account does; return what `usage` says was not computed."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0, **fields}
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60, trust_env=False) as client:
        response = await client.post(f"/client/v4/accounts/{account}/ai/v1/completions", json=body)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    assert usage["completion_tokens"] == 12
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def num_stored(fleet: Fleet) -> int:
    return int((await fleet.stats("kv-0")).kv_service.store.num_blocks)


async def published(fleet: Fleet, num_blocks: int) -> None:
    """Wait until the host's store has that many blocks."""

    async def are_there() -> bool:
        return await num_stored(fleet) >= num_blocks

    await until(are_there, 20)


async def missed(fleet: Fleet, *worker_ids: str) -> None:
    """Wait until no request is sent to these dead workers: decode would compute a prompt meant for such a prefill."""

    def are_missed() -> bool:
        return not any(worker.is_usable for worker_id in worker_ids if (worker := fleet.registry.get(worker_id)))

    await until(are_missed, 20)


def prefill_ledger(stream: RequestStream) -> pb.PhaseLedger:
    ledger = stream.state.prefill_ledger
    assert ledger is not None, "prefill has reported"
    return ledger


async def test_a_prompt_outlives_the_workers_that_computed_it(fleet: Fleet, checkpoint: Callable[[str], Path]) -> None:
    prompt = clear_prompt(checkpoint("llama"), 70, NUM_TOKENS)
    expected = greedy(checkpoint("llama"), prompt, NUM_TOKENS)
    # 1. Computed once, with the answer's blocks published by decode.
    assert (await run(fleet, prompt)).state.choices[0].tokens == expected
    num_full_blocks = (70 + NUM_TOKENS - 1) // BLOCK
    await published(fleet, num_full_blocks)
    # 2. Both workers die, and others take their place: their pools are empty.
    for worker_id in ("prefill-0", "decode-0"):
        fleet.services[worker_id].kill(signal.SIGKILL)
        await fleet.ended(fleet.services.pop(worker_id))
    _start_workers(fleet, checkpoint, "1")
    await fleet.ready()
    await missed(fleet, "prefill-0", "decode-0")
    # 3. The prompt again: its full blocks come from the store.
    stream = await run(fleet, prompt)
    assert stream.state.choices[0].tokens == expected
    ledger = prefill_ledger(stream)
    assert (ledger.num_loaded_tokens, ledger.num_cached_tokens, ledger.num_computed_tokens) == (64, 64, 6)
    assert stream.usage.num_cached_tokens == 64
    # 4. The next turn of the chat: what decode answered is there too.
    turn = [*prompt, *expected, 5, 6, 7]
    stream = await run(fleet, turn, 1)
    assert stream.state.choices[0].tokens == greedy(checkpoint("llama"), turn, 1)
    assert prefill_ledger(stream).num_cached_tokens == num_full_blocks * BLOCK
    await fleet.pools_are_full()


async def test_two_accounts_with_the_same_prompt_compute_all_of_it_each(
    fleet: Fleet, checkpoint: Callable[[str], Path]
) -> None:
    prompt = clear_prompt(checkpoint("llama"), 80, NUM_TOKENS)
    bytes_per_block = next(iter(fleet.registry.workers(pb.WORKER_ROLE_PREFILL))).load.kv.bytes_per_block
    before = await num_stored(fleet)
    for count, account in enumerate(("one", "two", "three"), start=1):
        stream = await run(fleet, prompt, account=account)
        # 1. Nothing of the others' is found: in prefill's pool, in the store, in decode's pool.
        ledger, decode_ledger = prefill_ledger(stream), stream.state.choices[0].ledger
        assert (ledger.num_cached_tokens, ledger.num_loaded_tokens, ledger.num_computed_tokens) == (0, 0, 80)
        assert decode_ledger is not None and decode_ledger.num_bytes_pulled == 5 * bytes_per_block
        assert (stream.usage.num_cached_tokens, stream.usage.num_computed_tokens) == (0, 80)
        # 2. Each leaves blocks of its own, of prompt and answer.
        await published(fleet, before + count * ((80 + NUM_TOKENS - 1) // BLOCK))
    assert await num_stored(fleet) == before + 3 * ((80 + NUM_TOKENS - 1) // BLOCK)
    # 3. Each finds its own, but for the block of the last token: one is always computed.
    ledger = prefill_ledger(await run(fleet, prompt, account="one"))
    assert (ledger.num_cached_tokens, ledger.num_computed_tokens) == (64, 16)


async def test_a_request_finds_and_leaves_what_it_asks_for_and_its_account_may(fleet: Fleet) -> None:
    prompt, before = list(range(3, 73)), await num_stored(fleet)  # four full blocks, and one that the answer fills

    async def ask(**fields: Any) -> int:
        return await cached_tokens(fleet, "modes", prompt, **fields)

    # 1. Neither of these leaves anything, or the third would find it.
    assert [await ask(prompt_cache="off"), await ask(prompt_cache="read"), await ask(prompt_cache="off")] == [0, 0, 0]
    # 2. With a bound two blocks are left, and found.
    assert await ask(prompt_cache_tokens=40) == 0
    await published(fleet, before + 2)
    assert [await ask(prompt_cache="read"), await ask(prompt_cache_tokens=20)] == [32, 16]
    assert await num_stored(fleet) == before + 2
    # 3. One that writes computes all and leaves all, the answer's block too.
    assert await ask(prompt_cache="write") == 0
    await published(fleet, before + 5)
    found = [
        await ask(),
        await ask(prompt_cache="read"),
        await ask(prompt_cache_tokens=40),
        await ask(prompt_cache="off"),
    ]
    assert found == [64, 64, 32, 0]
    # 4. A salt of the caller's own shares with the same salt only.
    assert [await ask(cache_salt="s"), await ask(cache_salt="s"), await ask(cache_salt="t")] == [0, 64, 0]
    await published(fleet, before + 15)
    # 5. An account without a cache has none, whatever it asks for.
    assert [await cached_tokens(fleet, "silent", prompt, prompt_cache="on") for _ in range(2)] == [0, 0]
    assert await num_stored(fleet) == before + 15


async def test_accounts_share_the_whole_blocks_of_a_public_text_and_nothing_behind_it(fleet: Fleet) -> None:
    encode, question = byte_level_tokenizer().encode, " Where is my card, and why is it blocked?"
    pairs = zip(encode(PUBLIC), encode(PUBLIC + question), strict=False)
    num_same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    num_shared = num_same // BLOCK * BLOCK
    assert 32 <= num_shared < len(encode(PUBLIC + question)) - BLOCK
    assert await cached_tokens(fleet, "first", PUBLIC + question) == 0
    assert await cached_tokens(fleet, "second", PUBLIC + question) == num_shared
    assert await cached_tokens(fleet, "third", PUBLIC + question, cache_salt="mine") == 0
    assert await cached_tokens(fleet, "fourth", PUBLIC + question, prompt_cache="write") == 0
    assert await cached_tokens(fleet, "second", PUBLIC + question) > num_shared


async def test_a_choice_that_moves_takes_its_cache_from_the_store(
    fleet: Fleet, checkpoint: Callable[[str], Path]
) -> None:
    prompt = clear_prompt(checkpoint("llama"), 90, NUM_TOKENS)
    num_tokens = 400  # enough for the worker to be killed before it is done
    at_first = await num_stored(fleet)
    asked = token_request("tiny-llama", prompt, num_tokens, account="first")
    expected = [token async for delta in await fleet.gateway.dispatcher.submit(asked) for token in delta.token_ids]
    assert expected[:NUM_TOKENS] == greedy(checkpoint("llama"), prompt, NUM_TOKENS)
    fleet.start("decode", "decode-2", "--model", str(checkpoint("llama")), *SMALL)
    await fleet.ready()
    before = at_first + (90 + num_tokens - 1) // BLOCK
    await published(fleet, before)
    request = token_request("tiny-llama", prompt, num_tokens, account="mover")  # nobody else's blocks are found
    stream = await fleet.gateway.dispatcher.submit(request)
    deltas = aiter(stream)
    tokens: list[int] = []
    while len(tokens) < 24:
        tokens += (await anext(deltas)).token_ids
    await published(fleet, before + (90 + 8) // BLOCK)
    call = stream.state.choices[0].call
    assert call is not None
    dead = call.link.worker.worker_id
    fleet.services[dead].kill(signal.SIGKILL)
    await fleet.ended(fleet.services.pop(dead))
    async for delta in deltas:
        tokens += delta.token_ids
    assert tokens == expected
    assert stream.state.choices[0].ledger is not None
    assert stream.state.choices[0].ledger.num_loaded_tokens >= 80, "most of the prompt came from the store"

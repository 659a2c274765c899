"""Real workers of several numerics classes beside one store: they share what the exactness of their model allows."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.kv.spaces import model_identity, space_of
from tests.system.conftest import SMALL
from tests.system.fleet import START_SECONDS, Fleet, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

GRAIN, BLOCK, NUM_PROMPT, NUM_TOKENS = 16, 32, 100, 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("spaces")) as fleet:
        fleet.start("kv", "kv-0")
        for name, exactness, tag in (("one", "layout", "a"), ("other", "layout", "b"), ("strict", "class", "b")):
            start(fleet, checkpoint, name, exactness, tag)
        yield fleet


def start(fleet: Fleet, checkpoint: Callable[[str], Path], name: str, exactness: str, tag: str) -> None:
    model = ("--model", str(checkpoint("llama")), *SMALL, "--block-size", str(BLOCK))
    fleet.start("decode", name, *model, "--exactness", exactness, "--numerics-tag", tag)


async def card_of(fleet: Fleet, name: str) -> pb.ModelCard:
    """Wait until a worker is ready and has found the KV service; return its card."""

    def is_loaded() -> bool:
        found = fleet.worker(name)
        return found is not None and found.info.HasField("card") and bool(found.info.kv_address)

    await until(is_loaded, START_SECONDS, lambda: fleet.tails([name]))
    found = fleet.worker(name)
    assert found is not None
    return found.info.card


async def ask(fleet: Fleet, name: str, tokens: list[int], *, space: bytes = b"") -> list[pb.Event]:
    """Send a worker what a gateway sends, and return its events; `space`: another one than the worker's own."""
    card, found = await card_of(fleet, name), fleet.worker(name)
    root = hash_root(model_identity(card.fingerprint), GRAIN, "", b"salt")
    submit = pb.Submit(
        request_id=f"{name}-{len(tokens)}-{os.urandom(4).hex()}",
        model=pb.ModelRef(model_id=card.model_id, fingerprint=card.fingerprint.digest),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, top_p=1, repetition_penalty=1),
        time_left_ms=60_000,
        account_tag=b"account!",
        hash_root=root,
        block_hashes=hash_blocks(root, tokens, GRAIN),
        hash_grain=GRAIN,
        space=space or space_of(card),
    )
    is_over = asyncio.Event()

    async def commands() -> AsyncIterator[pb.Command]:
        yield pb.Command(hello=pb.AttachHello(gateway_id="test", worker_incarnation=found.incarnation if found else ""))
        yield pb.Command(submit=submit)
        await is_over.wait()

    assert found is not None
    events: list[pb.Event] = []
    async with open_worker_channel(found.info, fleet.gateway.member) as channel:
        async for event in worker_pb2_grpc.WorkerServiceStub(channel).Attach(commands(), timeout=60):
            events.append(event)
            is_last = event.HasField("step") and any(output.HasField("ledger") for output in event.step.outputs)
            if is_last or event.HasField("refused") or event.HasField("failed"):
                is_over.set()
                break
    return events


async def answer(fleet: Fleet, name: str, tokens: list[int]) -> tuple[list[int], int, int]:
    """Return a worker's answer, and how many tokens of the prompt it found, and how many of these in the store."""
    outputs = [output for event in await ask(fleet, name, tokens) for output in event.step.outputs]
    ledger = outputs[-1].ledger
    return [token for each in outputs for token in each.token_ids], ledger.num_cached_tokens, ledger.num_loaded_tokens


async def published(fleet: Fleet, name: str, num_tokens: int) -> None:
    async def is_published() -> bool:
        counters = (await fleet.stats(name)).counters
        return counters["prompt_cache_blocks_published"] >= num_tokens // BLOCK

    await until(is_published, 20, lambda: fleet.tails([name]))


async def test_classes_share_what_layout_allows_and_nothing_else(
    fleet: Fleet, checkpoint: Callable[[str], Path]
) -> None:
    prompt = clear_prompt(checkpoint("llama"), NUM_PROMPT, NUM_TOKENS)
    first, num_cached, _ = await answer(fleet, "one", prompt)
    assert (first, num_cached) == (greedy(checkpoint("llama"), prompt, NUM_TOKENS), 0)
    await published(fleet, "one", len(prompt) + len(first) - 1)
    turn = [*prompt, *first, 5, 6, 7]
    num_shared = (len(prompt) + len(first) - 1) // BLOCK * BLOCK
    # 1. Under "layout" a worker of another class goes on from the blocks of prompt and answer.
    assert (await card_of(fleet, "one")).fingerprint.digest != (await card_of(fleet, "other")).fingerprint.digest
    assert (await answer(fleet, "other", turn))[1:] == (num_shared, num_shared)
    # 2. Under "class" a worker finds nothing of them, though it is of that other class; then what is its own.
    assert (await answer(fleet, "strict", turn))[1:] == (0, 0)
    assert (await answer(fleet, "strict", turn))[1] == len(turn) // BLOCK * BLOCK
    # 3. A request for another space is refused, and names both.
    strict, one = await card_of(fleet, "strict"), await card_of(fleet, "one")
    refused = (await ask(fleet, "strict", turn, space=space_of(one)))[-1].refused
    assert (refused.error.code, refused.error.field) == (pb.ERROR_CODE_FINGERPRINT_MISMATCH, "space")
    assert space_of(one).hex() in refused.error.message and space_of(strict).hex() in refused.error.message
    # 4. An upgrade: a new process of a third class begins with what the host's store has.
    service = fleet.services["one"]
    service.kill(signal.SIGTERM)
    await fleet.ended(service)
    start(fleet, checkpoint, "new", "layout", "c")
    assert (await answer(fleet, "new", turn))[1:] == (num_shared, num_shared)

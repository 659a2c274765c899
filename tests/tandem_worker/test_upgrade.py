"""Blocks on disk outlive an upgrade to another numerics class where the model promises less, and never otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kv_transfer_svc.disk import DiskTier
from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import FilledBlocks
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.kv.spaces import model_identity
from tandem_runtime.model_table import Exactness
from tandem_worker.model_card import model_card
from tandem_worker.requests import ActiveRequest, GatewayStream
from tandem_worker.submit_reader import SubmitReader
from tests.kv_transfer_svc.host import running_host
from tests.tandem_worker.kv_harness import until
from tests.tandem_worker.scripted_engine import ready
from tests.tandem_worker.test_kv_offload import BLOCK, Harness

NUM_BLOCKS = 7
PROMPT = list(range(NUM_BLOCKS * BLOCK + 1))
GRAIN = 8


def a_card(numerics_class: str, exactness: Exactness) -> pb.ModelCard:
    loaded = ready()
    model = msgspec.structs.replace(loaded.model, numerics_class=numerics_class)
    return model_card(msgspec.structs.replace(loaded, model=model), exactness)


def submit_to(card: pb.ModelCard, prompt: list[int], salt: bytes) -> pb.Submit:
    """Return what the worker makes of a gateway's Submit."""
    root = hash_root(model_identity(card.fingerprint), GRAIN, "", salt)
    reader = SubmitReader(card)
    submit = pb.Submit(
        request_id="r",
        model=pb.ModelRef(model_id="m", fingerprint=card.fingerprint.digest),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=pb.SamplingParams(max_tokens=4, top_p=1, repetition_penalty=1),
        hash_root=root,
        block_hashes=hash_blocks(root, prompt, GRAIN),
        hash_grain=GRAIN,
        space=reader.space,
        account_tag=b"account!",
    )
    reader.read(submit)
    return submit


@asynccontextmanager
async def a_life(folder: Path) -> AsyncIterator[Harness]:
    """Yield a worker beside a KV service; its blocks on disk are those of earlier lives."""
    async with running_host(folder, disk=DiskTier(folder / "disk", 16 << 20, 1 << 20)) as host:
        here = Harness(host)
        try:
            await here.lend()
            yield here
        finally:
            await here.offload.close()
            await here.link.close()
            here.region.close()


async def fill(here: Harness, submits: Iterable[pb.Submit]) -> None:
    """Report the blocks of prompts as computed, and wait until the store has them, in memory or on disk."""
    assert here.link.host is not None
    store = here.link.host.host_cache
    for submit in submits:
        num_expected = here.offload.counters["prompt_cache_blocks_published"] + NUM_BLOCKS
        slots = list(range(NUM_BLOCKS))
        generations = [here.region.generation(slot) for slot in slots]
        keys = [key.hex() for key in submit.block_hashes]
        filled = FilledBlocks("r", "", keys, slots, generations, region_id="pool")
        here.offload.on_filled(ActiveRequest(submit, GatewayStream()), filled)
        await until(lambda: here.offload.counters["prompt_cache_blocks_published"] == num_expected)  # noqa: B023
        await until(lambda: store.blocks.stats().demoting_bytes == 0)


async def num_found(here: Harness, card: pb.ModelCard, salt: bytes = b"salt") -> int:
    return len((await here.added(submit_to(card, PROMPT, salt))).prefix)


@pytest.mark.parametrize(("exactness", "num_after"), [("layout", NUM_BLOCKS), ("class", 0)])
async def test_a_disk_tier_is_used_by_the_next_class_only_under_layout(
    tmp_path: Path, exactness: Exactness, num_after: int
) -> None:
    old, new = a_card("torch-2.8", exactness), a_card("torch-2.9", exactness)
    # 1. A worker of the old class computes the prompt, and others until the prompt is on disk only.
    async with a_life(tmp_path) as here:
        others = [submit_to(old, [number, *PROMPT[1:]], b"salt") for number in range(100, 130)]
        await fill(here, [submit_to(old, PROMPT, b"salt"), *others])
        assert await num_found(here, old) == NUM_BLOCKS
    # 2. The new class begins with what the disk has, or with nothing.
    async with a_life(tmp_path) as here:
        assert await num_found(here, new) == num_after
        assert await num_found(here, new, b"another account") == 0
        other: Exactness = "class" if exactness == "layout" else "layout"
        assert await num_found(here, a_card("torch-2.9", other)) == 0, "a change of exactness starts an empty space"
        assert here.link.host is not None and here.link.host.host_cache.counters["blocks_loaded"] == num_after
    # 3. Taken back: the old class has its blocks again.
    async with a_life(tmp_path) as here:
        assert await num_found(here, old) == NUM_BLOCKS

"""Replays a scaled trace through a real Tandem with caches of a given number of blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.lib.random_model import TINY
from benchmarks.lib.served import Served
from benchmarks.lib.streaming import new_client
from benchmarks.trace_replay.mooncake import BLOCK_TOKENS, TraceRequest
from kv_transfer_svc.blocks.allocator import held_bytes

CONCURRENCY = 4
POOL_BLOCKS = 320
"""Of each worker: the longest prompt of the trace has 247, and `CONCURRENCY` ordinary ones have 100."""
MIN_STORE_BLOCKS = 256
"""A store takes a megabyte at least."""
_ROLES = ("decode", "kv", "prefill")


@dataclass(frozen=True)
class Capacity:
    """How many blocks can be kept, and where. All count, though most blocks of a pool are in the store too."""

    total_blocks: int

    def __post_init__(self) -> None:
        if self.store_blocks < MIN_STORE_BLOCKS:
            raise ValueError(
                f"{self.total_blocks} blocks are too few: two pools have {2 * POOL_BLOCKS}, and the store has "
                f"{MIN_STORE_BLOCKS} at least; play more requests, or give a larger share"
            )

    @property
    def store_blocks(self) -> int:
        """What the pools leave."""
        return self.total_blocks - 2 * POOL_BLOCKS


@dataclass(frozen=True)
class Played:
    """What came back, request by request in the trace's order, and what there was at the end."""

    cached_tokens: Sequence[int]
    num_stored_blocks: int
    counters: Mapping[str, float]
    """Of the prefill worker."""


async def play(requests: Sequence[TraceRequest], capacity: Capacity, model: Path, folder: Path) -> Played:
    """Send every request, the next as soon as one of `CONCURRENCY` is answered; raises RuntimeError if one is not."""
    environment = {
        "TANDEM_BLOCK_SIZE": str(BLOCK_TOKENS),
        "TANDEM_PREFILL_NUM_KV_BLOCKS": str(POOL_BLOCKS),
        "TANDEM_DECODE_NUM_KV_BLOCKS": str(POOL_BLOCKS),
        "TANDEM_KV_STORE_BYTES": str(capacity.store_blocks * held_bytes(block_bytes())),
        "TANDEM_CONTROL_HASH_GRAIN": str(BLOCK_TOKENS),
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
    }
    async with (
        Served(folder, ("--model", str(model)), environment, _ROLES) as served,
        new_client(served.base_url) as client,
    ):
        cached_tokens = await _ask_all(client, served.model, requests)
        return await _played(client, cached_tokens, capacity)


def block_bytes() -> int:
    """Return the bytes of a block of the tiny model's keys and values, float32."""
    row = TINY["num_key_value_heads"] * TINY["head_dim"]
    return int(BLOCK_TOKENS * TINY["num_hidden_layers"] * 2 * row * 4)


async def _ask_all(client: httpx.AsyncClient, model: str, requests: Sequence[TraceRequest]) -> list[int]:
    cached_tokens = [0] * len(requests)
    waiting = iter(enumerate(requests))

    async def keep_asking() -> None:
        for index, request in waiting:
            cached_tokens[index] = await _ask(client, model, request)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(keep_asking())
    return cached_tokens


async def _ask(client: httpx.AsyncClient, model: str, request: TraceRequest) -> int:
    """Return how many tokens of the prompt were not computed."""
    answer = await client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": request.token_ids(TINY["vocab_size"]),
            "temperature": 0,
            "max_tokens": request.num_output_tokens,
            "min_tokens": request.num_output_tokens,
        },
    )
    if not answer.is_success:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    usage = answer.json()["usage"]
    if usage["prompt_tokens"] != request.num_prompt_tokens:
        raise RuntimeError(f"a prompt of {request.num_prompt_tokens} tokens was counted as {usage['prompt_tokens']}")
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


async def _played(client: httpx.AsyncClient, cached_tokens: Sequence[int], capacity: Capacity) -> Played:
    """Return what came back; raises RuntimeError if a capacity differs from the configured one."""
    workers = {entry["role"]: entry for entry in (await client.get("/v1/workers")).json()["data"]}
    store, pools = workers["kv"]["kv_service"]["store"], [workers[role]["kv"] for role in ("prefill", "decode")]
    num_blocks = store["total_bytes"] // held_bytes(pools[0]["bytes_per_block"])
    num_blocks += sum(pool["total_blocks"] for pool in pools)
    if num_blocks != capacity.total_blocks:
        raise RuntimeError(f"there was room for {num_blocks} blocks, not for {capacity.total_blocks}")
    return Played(cached_tokens, store["num_blocks"], workers["prefill"]["load"]["counters"])

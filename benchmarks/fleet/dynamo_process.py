"""Runs in Dynamo's environment, without anything of ours: answers which workers Dynamo's router selects.

A JSON object a line on stdin, one on stdout. The router is `SelectionService` of `ai-dynamo-runtime`, once for prefill
and once for decode, with what Dynamo's documents say of its disaggregated mode: prefill counts no decode blocks, decode
neither chases prefixes nor counts prompt tokens. Its index is fed by its own decisions (without KV events), bounded by
the workers' pools.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

COMMON = {
    "DYN_LOG": "off",
    "DYN_USE_KV_EVENTS": "false",
    "DYN_ROUTER_USE_KV_EVENTS": "false",
    "DYN_ROUTER_APPROXIMATE_CACHE_POLICY": "lru",
    "DYN_ROUTER_TTL_SECS": "36000",
}
BY_ROLE = {
    "prefill": {"DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "false"},
    "decode": {
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0",
        "DYN_ROUTER_ASSUME_KV_REUSE": "false",
        "DYN_ROUTER_TRACK_PREFILL_TOKENS": "false",
    },
    "both": {},
}
MODEL = "simulated"


async def service(role: str, workers: Iterable[int], block_tokens: int, pool_tokens: int) -> Any:
    """Return the router of a role, with its workers."""
    os.environ.update(COMMON | BY_ROLE[role])
    from dynamo._core import SelectionService  # type: ignore[import-not-found]  # in its own environment only

    made = SelectionService(indexer_threads=1)
    for name in {name for settings in BY_ROLE.values() for name in settings}:
        os.environ.pop(name, None)
    for number in workers:
        await made.upsert_worker(
            {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": f"http://127.0.0.1:{1 + number}",
                "kv_events_endpoint": f"tcp://127.0.0.1:{1 + number}",
                "block_size": block_tokens,
                "total_kv_blocks": pool_tokens // block_tokens,
                "max_num_batched_tokens": 8192,
            }
        )
    return made


def request_of(entry: dict[str, Any]) -> dict[str, Any]:
    blocks = entry["blocks"]
    return {
        "model_name": MODEL,
        "block_hashes": blocks,
        "sequence_hashes": blocks,
        "isl_tokens": entry["tokens"],
    }


async def select(made: Any, entry: dict[str, Any]) -> list[int]:
    """Return the worker, and the prompt tokens that it has cached."""
    chosen = await made.select(request_of(entry))
    return [chosen["worker_id"], entry["tokens"] - chosen["effective_prefill_tokens"]]


async def book(made: Any, entry: dict[str, Any], number: int) -> None:
    await made.create_reservation({**request_of(entry), "selection_id": entry["id"], "worker_id": number})


async def answer(services: tuple[Any, Any], entry: dict[str, Any]) -> Any:
    """Do what a line says."""
    prefill, decode = services
    does = entry["does"]
    if does == "place":
        return [await select(made, entry) for made in (prefill, decode) if made is not None]
    if does == "accepted":
        if prefill is not None:
            await book(prefill, entry, entry["prefill"])
        await book(decode, entry, entry["decode"])
    elif does == "prompt_read":
        if prefill is not None:
            await prefill.prefill_complete(entry["id"])
            await prefill.free_reservation(entry["id"])
        await decode.prefill_complete(entry["id"])
    else:
        await decode.free_reservation(entry["id"])
    return True


async def main() -> None:
    """Answer lines until there are no more."""
    first = json.loads(sys.stdin.readline())
    sizes = first["block_tokens"], first["pool_tokens"]
    num_prefill, num_workers = first["num_prefill"], first["num_workers"]
    prefill = await service("prefill", range(num_prefill), *sizes) if num_prefill else None
    decode = await service("decode" if num_prefill else "both", range(num_prefill, num_workers), *sizes)
    print(json.dumps(True), flush=True)
    for line in sys.stdin:
        print(json.dumps(await answer((prefill, decode), json.loads(line))), flush=True)


asyncio.run(main())

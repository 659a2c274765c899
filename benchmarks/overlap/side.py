"""Answers rounds of equal requests with one engine process; run as a file, perhaps with another checkout's code.

argument   JSON: {"model", "num_threads", "max_batch", "num_tokens", "settings"}
stdin      a line per round: the number of requests
stdout     "ready", then a line per round: the mean seconds from one step with all requests to the next
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tandem_engine.channel import Received, close_all
from tandem_engine.client import EngineClient
from tandem_engine.messages import AddRequest, EngineFailed, Ready, StepDone
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

_NUM_PROMPT_TOKENS = 64


async def main() -> None:
    """Serve until stdin ends."""
    load: dict[str, Any] = json.loads(sys.argv[1])
    length = _NUM_PROMPT_TOKENS + load["num_tokens"]
    config = EngineConfig(
        model=load["model"],
        device="cpu",
        speculation="off",  # random weights repeat themselves, which no model does
        num_threads=load["num_threads"],
        num_kv_blocks=load["max_batch"] * (length // 16 + 2),
        max_num_seqs=load["max_batch"],
        **load["settings"],
    )
    client = await EngineClient.start(config)
    try:
        events = client.events()
        async for received in events:
            close_all(received.fds)
            if isinstance(received.message, EngineFailed):
                raise SystemExit(received.message.message)
            if isinstance(received.message, Ready):
                break
        print("ready", flush=True)
        number = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            number += 1
            print(await _round(client, events, number, int(line), load["num_tokens"]), flush=True)
    finally:
        await client.stop()


async def _round(
    client: EngineClient, events: AsyncIterator[Received], number: int, batch: int, num_tokens: int
) -> float:
    for index in range(batch):
        prompt = [5 + (7 * index + 13 * place) % 290 for place in range(_NUM_PROMPT_TOKENS)]
        sampling = SamplingParams(num_tokens, temperature=0.0)
        client.send(AddRequest(f"{number}-{index}", prompt, len(prompt), sampling))
    times: list[float] = []
    num_left = batch
    async for received in events:
        if isinstance(received.message, StepDone):
            outputs = received.message.outputs
            num_left -= sum(output.is_last for output in outputs)
            if len(outputs) == batch:
                times.append(time.perf_counter())
            if not num_left:
                break
    return (times[-1] - times[0]) / (len(times) - 1)


if __name__ == "__main__":
    asyncio.run(main())

"""Takes steps' messages through a gateway's link, requests and streams, and prints processor seconds per token.

    python steps.py NUM_STEPS

Runs by its path in any checkout, with that checkout on PYTHONPATH: it uses nothing of ours but the harness of tests.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import structlog

from control_plane.dispatch.request_stream import RequestStream
from tandem.v1 import types_pb2 as pb
from tests.control_plane.harness import Harness, harness, new_request
from tests.control_plane.scripted_worker import DECODE, PREFILL, ScriptedWorker, only_accept, token_at

_NUM_STREAMS = 256
_WARM_STEPS = 50
_POOL_BLOCKS = 1 << 20


def _step(submits: list[pb.Submit], number: int) -> pb.Event:
    """Return the message of a step that has computed a token of each answer."""
    outputs = []
    for submit in submits:
        position = submit.num_prompt_tokens + number
        token_ids = [token_at(position)]
        outputs.append(
            pb.TokenOutput(request_id=submit.request_id, attempt=submit.attempt, position=position, token_ids=token_ids)
        )
    return pb.Event(step=pb.StepBatch(step=number, outputs=outputs))


async def measured(num_steps: int) -> list[float]:
    """Return the processor seconds per token of each step: from a message's bytes until all streams have the token."""
    prefill, decode = ScriptedWorker("p", PREFILL), ScriptedWorker("d", DECODE, only_accept)
    for worker in (prefill, decode):
        worker.pool = pb.KvPool(num_total_blocks=_POOL_BLOCKS, num_free_blocks=_POOL_BLOCKS, tokens_per_block=16)
    seconds = []
    async with harness(prefill, decode, queue_seconds=30.0) as here:
        num_tokens = _WARM_STEPS + num_steps + 10
        streams = [await _begun(here, decode, number, num_tokens) for number in range(_NUM_STREAMS)]
        readers = [aiter(stream) for stream in streams]
        link = here.links.get(here.registry.workers(DECODE)[0])
        for number in range(1, _WARM_STEPS + num_steps + 1):
            serialized = _step(decode.submits, number).SerializeToString()
            began = time.process_time()
            link._handle(pb.Event.FromString(serialized))
            for reader in readers:
                await anext(reader)
            seconds.append((time.process_time() - began) / _NUM_STREAMS)
        for stream in streams:
            await stream.aclose()
    return seconds[_WARM_STEPS:]


async def _begun(here: Harness, decode: ScriptedWorker, number: int, num_tokens: int) -> RequestStream:
    """Return a stream whose first token has come: a gateway lets few requests without one go to a worker."""
    stream = await here.dispatcher.submit(new_request(max_tokens=num_tokens, request_id=f"r{number}"))
    await decode.until(lambda worker: len(worker.submits) == number + 1)
    here.links.get(here.registry.workers(DECODE)[0])._handle(_step(decode.submits[-1:], 0))
    return stream


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print(*asyncio.run(measured(int(sys.argv[1]))))

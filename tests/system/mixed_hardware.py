"""Requests through the gateway to a fleet with a prefill worker of one numerics class and decode workers of two.

The workers are `prefill-cpp` and `decode-cpp`, with C++ kernels and blocks of 16 tokens, and `decode-torch`, with plain
torch and blocks of 32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from control_plane.dispatch.request_stream import RequestStream
from tandem.v1 import types_pb2 as pb
from tests.system.fleet import Fleet, token_request
from tests.system.reference import clear_prompt, greedy
from tests.system.streams import MODEL

NUM_TOKENS = 12


async def answered(
    fleet: Fleet, prompt: list[int], model_id: str = MODEL, **changes: Any
) -> tuple[RequestStream, list[int]]:
    request = token_request(model_id, prompt, NUM_TOKENS, cacheable=False, **changes)
    stream = await fleet.gateway.dispatcher.submit(request)
    return stream, [token async for delta in stream for token in delta.token_ids]


def card(fleet: Fleet, name: str) -> pb.ModelCard:
    worker = fleet.worker(name)
    assert worker is not None, f"{name} is not registered"
    return worker.info.card


def decode_ledger(stream: RequestStream) -> pb.PhaseLedger:
    ledger = stream.state.choices[0].ledger
    assert ledger is not None, "the request has ended"
    return ledger


async def lost_half_way(fleet: Fleet, folder: Path, model_id: str = MODEL) -> None:
    """Kill the decode worker of an answer: the one of the other class goes on, behind a seam."""
    prompt = clear_prompt(folder, 40, 48)
    stream = await fleet.gateway.dispatcher.submit(token_request(model_id, prompt, 48, cacheable=False))
    tokens, killed = list[int](), ""
    async for delta in stream:
        tokens += delta.token_ids
        call = stream.state.choices[0].call
        if len(tokens) >= 4 and not killed and call is not None:
            killed = call.worker_id
            fleet.services.pop(killed).kill()
    assert tokens == greedy(folder, prompt, 48)
    moves = [seam for seam in stream.state.history.seams if seam.before.worker_id == killed]
    assert [seam.after.worker_id for seam in moves] == [({"decode-cpp", "decode-torch"} - {killed}).pop()]
    assert stream.usage.num_seams == len(stream.state.history.seams) >= 1

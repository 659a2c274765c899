"""One model on two kinds of machine, through the gateway: which workers share blocks, and what answers are worth.

Prefill has C++ kernels and blocks of 16 tokens, one decode worker plain torch and blocks of 32: another numerics class
and another layout.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from control_plane.dispatch.request_stream import RequestStream
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.spaces import space_of
from tests.system.fleet import Fleet, token_request
from tests.system.reference import clear_prompt, greedy
from tests.system.streams import MODEL

NUM_TOKENS = 12
SMALL = ("--num-threads", "1", "--num-kv-blocks", "128", "--dtype", "float32")
CPP = (*SMALL, "--kernels", "cpp", "--block-size", "16")
TORCH = (*SMALL, "--kernels", "torch", "--block-size", "32")


@asynccontextmanager
async def fleet_of(
    folder: Path, exactness: str, *decodes: tuple[str, tuple[str, ...]], local_prefill: str = "never"
) -> AsyncIterator[Fleet]:
    """Run a prefill worker with C++ kernels, a KV service and these decode workers."""
    shared = ("--exactness", exactness)
    async with Fleet(folder, local_prefill=local_prefill) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-cpp", *CPP, *shared)
        for name, flags in decodes:
            fleet.start("decode", name, *flags, *shared)
        await fleet.ready()
        yield fleet


async def answered(fleet: Fleet, prompt: list[int], **changes: Any) -> tuple[RequestStream, list[int]]:
    request = token_request(MODEL, prompt, NUM_TOKENS, cacheable=False, **changes)
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


async def lost_half_way(fleet: Fleet, folder: Path) -> None:
    """Kill the decode worker of an answer: the one of the other class goes on, behind a seam."""
    prompt = clear_prompt(folder, 40, 48)
    stream = await fleet.gateway.dispatcher.submit(token_request(MODEL, prompt, 48, cacheable=False))
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


async def test_under_layout_decode_reads_what_another_kind_of_machine_has_computed(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("demo")
    async with fleet_of(tmp_path, "layout", ("decode-torch", TORCH)) as fleet:
        prefill, decode = card(fleet, "prefill-cpp"), card(fleet, "decode-torch")
        assert prefill.fingerprint.numerics_class != decode.fingerprint.numerics_class
        assert (prefill.block_size, decode.block_size) == (16, 32)
        assert space_of(prefill) == space_of(decode)
        for length in (20, 33, 64, 100):
            prompt = clear_prompt(folder, length, NUM_TOKENS)
            stream, tokens = await answered(fleet, prompt)
            assert tokens == greedy(folder, prompt, NUM_TOKENS)
            ledger = decode_ledger(stream)
            assert (ledger.num_computed_tokens, ledger.num_reprefill_tokens) == (0, 0)
            assert stream.usage.num_computed_tokens == length
            # The first token is of prefill's class, and the answer says so.
            (seam,) = stream.state.history.seams
            assert (seam.before.worker_id, seam.after.worker_id) == ("prefill-cpp", "decode-torch")
        await fleet.pools_are_full()
        fleet.start("decode", "decode-cpp", *CPP, "--exactness", "layout")
        await fleet.ready("decode-cpp")
        await lost_half_way(fleet, folder)


async def test_under_class_each_worker_stays_with_its_own(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder, seen = checkpoint("demo"), dict[str, set[str]]()
    decodes = ("decode-cpp", CPP), ("decode-torch", TORCH)
    async with fleet_of(tmp_path, "class", *decodes, local_prefill="auto") as fleet:
        assert space_of(card(fleet, "prefill-cpp")) == space_of(card(fleet, "decode-cpp"))
        assert space_of(card(fleet, "prefill-cpp")) != space_of(card(fleet, "decode-torch"))
        prompt = clear_prompt(folder, 64, NUM_TOKENS)
        for number in range(200):
            stream, tokens = await answered(fleet, prompt, salt=str(number).encode())
            assert tokens == greedy(folder, prompt, NUM_TOKENS)
            assert not stream.state.history.seams
            calls = {call.is_prefill: call.worker_id for call in stream.state.history.calls}
            seen.setdefault(calls[False], set()).add(calls.get(True, ""))
            assert decode_ledger(stream).num_computed_tokens == (0 if True in calls else 64)
            if number >= 20 and len(seen) == 2:
                break
        assert seen["decode-torch"] == {""} and seen["decode-cpp"] <= {"prefill-cpp", ""}
        await fleet.pools_are_full()
        await lost_half_way(fleet, folder)

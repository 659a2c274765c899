"""Prefill workers of one kind and decode workers of another: the blocks are converted, and no prompt computed twice.

Each test but the last writes the Submits itself, in place of the gateway.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from control_plane.secrets import handle_signer
from tandem.v1 import types_pb2 as pb
from tandem.v1.worker_pb2_grpc import WorkerServiceStub
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.spaces import model_identity, space_of
from tests.system.fleet import Fleet, until
from tests.system.mixed_hardware import NUM_TOKENS as NUM_ROUTED_TOKENS
from tests.system.mixed_hardware import answered, card, decode_ledger, lost_half_way
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

GRAIN = 16
NUM_TOKENS = 24
SMALL = ("--num-threads", "1", "--num-kv-blocks", "256", "--exactness", "layout")
CPP = (*SMALL, "--dtype", "float32", "--kernels", "cpp", "--block-size", "16")
TORCH = (*SMALL, "--dtype", "float32", "--kernels", "torch", "--block-size", "32")
BFLOAT16 = (*SMALL, "--dtype", "bfloat16", "--route", "transformers", "--block-size", "16")
WORKERS = {
    "prefill-cpp": CPP,
    "prefill-torch": TORCH,
    "prefill-bf16": BFLOAT16,
    "decode-torch": TORCH,
    "decode-grpc": (*TORCH, "--kv-transport", "grpc"),
    "decode-cpp": CPP,
}
PAIRS = {
    "demo": [
        ("prefill-cpp", "decode-torch"),
        ("prefill-cpp", "decode-grpc"),
        ("prefill-torch", "decode-cpp"),
        ("prefill-bf16", "decode-cpp"),
    ],
    "gemma2": [("prefill-cpp", "decode-torch"), ("prefill-torch", "decode-cpp")],
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    prefill: pb.PhaseLedger
    decode: pb.PhaseLedger


class Pair:
    """Gives a prompt to a prefill worker, and its handle to a decode worker."""

    def __init__(self, fleet: Fleet, prefill: str, decode: str, account: str) -> None:
        self._fleet = fleet
        self._account = account.encode()
        found = [fleet.worker(name) for name in (prefill, decode)]
        self._infos = [worker.info for worker in found if worker is not None]
        assert len(self._infos) == 2, f"{prefill} or {decode} is not registered"

    async def run(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Answer:
        prefill, decode = self._infos
        name = f"r{time.monotonic_ns()}"
        handle = self._handle(name, prefill, len(prompt))
        first = self._submit(name, prefill.card, prompt, num_tokens, handle)
        second = self._submit(name + "-0", decode.card, prompt, num_tokens, handle)
        first.choice_seeds.append(0)
        second.handle_layout.CopyFrom(prefill.card.layout)
        here, there = await asyncio.gather(self._outputs(prefill, first), self._outputs(decode, second))
        return Answer([token for output in there for token in output.token_ids], here[-1].ledger, there[-1].ledger)

    def _handle(self, name: str, prefill: pb.WorkerInfo, num_tokens: int) -> pb.KvHandle:
        (holder,) = self._fleet.registry.kv_services(prefill.host_id)
        gateway: Any = self._fleet.gateway
        handle = pb.KvHandle(
            handle_id=os.urandom(16),
            request_id=name,
            prefill_incarnation=prefill.incarnation,
            holder_address=holder.address,
            holder_incarnation=holder.incarnation,
            holder_id=holder.worker_id,
            model=_model(prefill.card),
            layout_digest=layout_digest(prefill.card.layout),
            num_tokens=num_tokens,
            num_readers=1,
            deadline_unix_ms=int((time.time() + 60) * 1000),
        )
        return handle_signer(gateway._secret).sign(handle)

    def _submit(
        self, name: str, card: pb.ModelCard, prompt: list[int], num_tokens: int, handle: pb.KvHandle
    ) -> pb.Submit:
        root = hash_root(model_identity(card.fingerprint), GRAIN, "", self._account)
        return pb.Submit(
            request_id=name,
            model=_model(card),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=pb.SamplingParams(max_tokens=num_tokens, top_p=1, repetition_penalty=1),
            handle=handle,
            time_left_ms=60_000,
            space=space_of(card),
            hash_grain=GRAIN,
            hash_root=root,
            block_hashes=hash_blocks(root, prompt, GRAIN),
        )

    async def _outputs(self, info: pb.WorkerInfo, submit: pb.Submit) -> list[pb.TokenOutput]:
        """Return a request's outputs, the last one with its ledger."""
        outputs: list[pb.TokenOutput] = []
        async with open_worker_channel(info, self._fleet.gateway.member) as channel:
            call: Any = WorkerServiceStub(channel).Attach()
            await call.write(pb.Command(hello=pb.AttachHello(gateway_id="test", gateway_incarnation="test")))
            await call.write(pb.Command(submit=submit))
            async for event in call:
                assert event.WhichOneof("kind") in ("hello", "accepted", "step"), event
                outputs += event.step.outputs
                if outputs and outputs[-1].HasField("ledger"):
                    return outputs
        raise AssertionError(f"{info.worker_id} ended the stream")


def _model(card: pb.ModelCard) -> pb.ModelRef:
    return pb.ModelRef(model_id=card.model_id, fingerprint=card.fingerprint.digest)


@dataclass(frozen=True)
class World:
    fleet: Fleet
    folder: Path
    pairs: list[tuple[str, str]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["demo", "gemma2"])
async def world(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Of the layers of gemma2, every second has a window of 16 tokens."""
    folder, pairs = checkpoint(request.param), PAIRS[request.param]
    async with Fleet(tmp_path_factory.mktemp(f"mixed-{request.param}")) as fleet:
        fleet.start("kv", "kv-0")
        workers = sorted({name for pair in pairs for name in pair})
        for name in workers:
            fleet.start(name.partition("-")[0], name, "--model", str(folder), *WORKERS[name])

        def all_ready() -> bool:  # the gateway keeps some of them apart, which is no matter here
            found = [fleet.worker(name) for name in workers]
            return all(worker is not None and worker.is_ready and worker.info.kv_address for worker in found)

        await until(all_ready, 180, lambda: fleet.tails(workers))
        yield World(fleet, folder, pairs)


async def test_decode_converts_the_blocks_of_another_kind_of_worker_and_computes_no_prompt(world: World) -> None:
    for prefill, decode in world.pairs:
        pair = Pair(world.fleet, prefill, decode, f"{prefill} to {decode}")
        for length in (1, 16, 45, 150):
            prompt = clear_prompt(world.folder, length, NUM_TOKENS, first_seed=length)
            answer = await pair.run(prompt)
            what = f"{prefill} to {decode}, {length} tokens"
            assert (answer.prefill.num_computed_tokens, answer.prefill.num_cached_tokens) == (length, 0), what
            assert answer.decode.num_computed_tokens == answer.decode.num_reprefill_tokens == 0, what
            assert answer.decode.num_bytes_pulled > 0, what
            assert answer.decode.transport == ("grpc" if decode == "decode-grpc" else "shm"), what
            if prefill != "prefill-bf16":  # its KV is another one: it has eight bits
                assert answer.tokens == greedy(world.folder, prompt, NUM_TOKENS), what
            assert len(answer.tokens) == NUM_TOKENS, what
        await world.fleet.pools_are_full()


async def test_converted_blocks_are_found_by_the_next_turn_and_only_the_rest_is_pulled(world: World) -> None:
    pair = Pair(world.fleet, "prefill-cpp", "decode-torch", "a conversation")
    prompt = clear_prompt(world.folder, 150, 2 * NUM_TOKENS, first_seed=1000)
    answer = greedy(world.folder, prompt, 2 * NUM_TOKENS)
    first = await pair.run(prompt)
    second = await pair.run([*prompt, *first.tokens])
    assert [*first.tokens, *second.tokens] == answer
    assert second.decode.num_computed_tokens == second.decode.num_reprefill_tokens == 0
    assert (first.decode.num_cached_tokens, second.decode.num_cached_tokens) == (0, 160)  # five blocks of 32
    assert second.decode.num_bytes_pulled < first.decode.num_bytes_pulled
    await world.fleet.pools_are_full()


@pytest.mark.parametrize("world", ["demo"], indirect=True)
async def test_through_the_gateway_decode_reads_what_another_kind_of_machine_has_computed(world: World) -> None:
    """The last test with this fleet: it ends the workers that it is not about, and kills one."""
    fleet, folder = world.fleet, world.folder
    async with httpx.AsyncClient(base_url=f"{fleet.base_url}/v1/workers", trust_env=False) as http:
        # 1. Left are prefill with C++ kernels and decode with plain torch: another class, and blocks of another size.
        ending = [fleet.services.pop(name) for name in ("prefill-torch", "prefill-bf16", "decode-grpc")]
        for service in ending:
            service.kill(signal.SIGTERM)
        assert await asyncio.gather(*(fleet.ended(service) for service in ending)) == [0, 0, 0]
        assert (await http.post("/decode-cpp/drain")).status_code == 200
        await until(lambda: (found := fleet.worker("decode-cpp")) is not None and not found.is_usable, 20)
        await fleet.ready("kv-0", "prefill-cpp", "decode-torch")
        prefill, decode = card(fleet, "prefill-cpp"), card(fleet, "decode-torch")
        assert prefill.fingerprint.numerics_class != decode.fingerprint.numerics_class
        assert (prefill.block_size, decode.block_size) == (16, 32)
        assert space_of(prefill) == space_of(decode)
        for length in (20, 33, 64, 100):
            prompt = clear_prompt(folder, length, NUM_ROUTED_TOKENS)
            stream, tokens = await answered(fleet, prompt, prefill.model_id)
            assert tokens == greedy(folder, prompt, NUM_ROUTED_TOKENS)
            ledger = decode_ledger(stream)
            assert (ledger.num_computed_tokens, ledger.num_reprefill_tokens) == (0, 0)
            assert stream.usage.num_computed_tokens == length
            # The first token is of prefill's class, and the answer says so.
            (seam,) = stream.state.history.seams
            assert (seam.before.worker_id, seam.after.worker_id) == ("prefill-cpp", "decode-torch")
        await fleet.pools_are_full()
        # 2. A decode worker of prefill's class is back, and one of the two is lost.
        assert (await http.post("/decode-cpp/resume")).status_code == 200
        await fleet.ready("decode-cpp")
    await lost_half_way(fleet, folder, prefill.model_id)

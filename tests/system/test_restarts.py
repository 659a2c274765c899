"""The fleet recovers after a restart of the KV service or the control plane."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    model = ("--model", str(checkpoint("llama")), *SMALL)
    async with Fleet(tmp_path_factory.mktemp("restarts")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *model)
        fleet.start("decode", "decode-0", *model)
        await fleet.ready()
        yield fleet


@pytest.fixture(scope="module")
def prompt(checkpoint: Callable[[str], Path]) -> list[int]:
    return clear_prompt(checkpoint("llama"), 70, NUM_TOKENS)


def ask(prompt: list[int]) -> TokenRequest:
    return token_request("tiny-llama", prompt, NUM_TOKENS, cacheable=False)


async def run(fleet: Fleet, prompt: list[int]) -> RequestStream:
    stream = await fleet.gateway.dispatcher.submit(ask(prompt))
    async for _ in stream:
        pass
    return stream


async def test_requests_go_on_without_the_kv_service_and_hand_over_again_with_the_next(
    fleet: Fleet, checkpoint: Callable[[str], Path], prompt: list[int]
) -> None:
    expected = greedy(checkpoint("llama"), prompt, NUM_TOKENS)
    # 1. The service dies; the very next request, which does not know yet, is answered all the same.
    fleet.services["kv-0"].kill(signal.SIGKILL)
    await fleet.ended(fleet.services.pop("kv-0"))
    assert (await run(fleet, prompt)).state.choices[0].tokens == expected
    # 2. Once the control plane knows, decode is asked to do both.
    await until(lambda: not fleet.registry.kv_services(), 10)
    stream = await run(fleet, prompt)
    assert (stream.state.choices[0].tokens, stream.route["prefill"]) == (expected, "")
    # 3. Another one starts, the workers find it, and the cache moves again.
    fleet.start("kv", "kv-1")
    await fleet.ready()

    async def handed_over() -> bool:
        ledger = (await run(fleet, prompt)).state.choices[0].ledger
        return ledger is not None and ledger.num_bytes_pulled > 0

    await until(handed_over, 20)
    # 4. Nothing is left.
    await fleet.pools_are_full(30)


async def test_a_restarted_control_plane_knows_the_fleet_within_a_heartbeat(
    fleet: Fleet, checkpoint: Callable[[str], Path], prompt: list[int]
) -> None:
    before = {name: worker.incarnation for name in fleet.services if (worker := fleet.registry.get(name))}
    assert set(before) == {"prefill-0", "decode-0", "kv-1"}
    await fleet.restart_gateway()
    await until(lambda: len(fleet.registry.workers()) == len(before), 10)
    assert {worker.worker_id: worker.incarnation for worker in fleet.registry.workers()} == before
    await fleet.ready()
    stream = await run(fleet, prompt)
    assert stream.state.choices[0].tokens == greedy(checkpoint("llama"), prompt, NUM_TOKENS)
    await fleet.pools_are_full()


async def test_the_end_of_a_gateway_ends_what_it_had_asked_for(fleet: Fleet, prompt: list[int]) -> None:
    """A gateway that is gone holds nothing: its streams break, and the workers cancel what came over them."""
    await fleet.gateway.dispatcher.submit(token_request("tiny-llama", prompt, 400, cacheable=False))
    await fleet.restart_gateway()
    await fleet.ready()
    await fleet.pools_are_full()

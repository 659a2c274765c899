"""Requests spread and continue while workers join and leave."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from control_plane.dispatch.request_stream import RequestStream
from control_plane.generation import TokenRequest
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt, greedy

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two of each worker, prefill and decode with different settings."""
    model = ("--model", str(checkpoint("llama")), *SMALL)
    async with Fleet(tmp_path_factory.mktemp("changes")) as fleet:
        fleet.start("kv", "kv-0")
        for index in range(2):
            fleet.start("prefill", f"prefill-{index}", *model, "--max-num-batched-tokens", "32", "--max-num-seqs", "16")
            fleet.start("decode", f"decode-{index}", *model, "--max-num-batched-tokens", "128")
        await fleet.ready()
        yield fleet


async def finish(stream: RequestStream) -> list[int]:
    async for _ in stream:
        pass
    return stream.state.choices[0].tokens


@dataclass(frozen=True)
class Ask:
    """A question with a known answer."""

    prompt: list[int]
    expected: list[int]

    @property
    def request(self) -> TokenRequest:
        return token_request("tiny-llama", self.prompt, len(self.expected), cacheable=False)

    async def of(self, fleet: Fleet) -> dict[str, Any]:
        """Ask, check the answer, and return the route it took."""
        stream = await fleet.gateway.dispatcher.submit(self.request)
        assert await finish(stream) == self.expected
        return dict(stream.route)


@pytest.fixture(scope="module")
def ask(checkpoint: Callable[[str], Path]) -> Callable[[int, int], Ask]:
    """Make a question of a prompt's length and an answer's."""

    def make(length: int, num_tokens: int) -> Ask:
        folder = checkpoint("llama")
        prompt = clear_prompt(folder, length, num_tokens)
        return Ask(prompt, greedy(folder, prompt, num_tokens))

    return make


MakeAsk = Callable[[int, int], Ask]


async def test_requests_spread_over_two_of_each(fleet: Fleet, ask: MakeAsk) -> None:
    """New workers grant few places at first, and the one whose first token comes sooner gets the requests that wait.

    A decode worker computes a prompt itself where that is sooner, while both prefill workers have prompts in line.
    """
    question = ask(55, 40)
    for are_new in (True, False):
        routes = await asyncio.gather(*(question.of(fleet) for _ in range(24)))
        by_role = {role: Counter(route[role] for route in routes) for role in ("prefill", "decode")}
        for role, counts in by_role.items():  # by speed, which the first prompts have measured
            assert set(counts) - {""} == {f"{role}-0", f"{role}-1"}, by_role
        assert "" not in by_role["decode"], by_role
        assert are_new or min(by_role["decode"].values()) >= 8, by_role
    await fleet.pools_are_full()


async def test_one_more_worker_joins_and_is_used_without_a_restart(
    fleet: Fleet, ask: MakeAsk, checkpoint: Callable[[str], Path]
) -> None:
    fleet.start("decode", "decode-2", "--model", str(checkpoint("llama")), *SMALL)
    await fleet.ready()
    question = ask(55, 40)
    routes = await asyncio.gather(*(question.of(fleet) for _ in range(24)))
    assert "decode-2" in {route["decode"] for route in routes}


@pytest.mark.parametrize("worker_id", ["decode-1", "prefill-1"])
async def test_sigterm_drains_a_worker_without_a_failed_request(fleet: Fleet, ask: MakeAsk, worker_id: str) -> None:
    question, in_flight = ask(55, 40), fleet.gateway.dispatcher.router.in_flight
    requests = [asyncio.create_task(question.of(fleet)) for _ in range(16)]
    service = fleet.services[worker_id]
    await until(lambda: in_flight.total() > 0, 10)
    service.kill(signal.SIGTERM)
    while service.process.poll() is None:  # and the traffic goes on while it drains
        await question.of(fleet)
    await asyncio.gather(*requests)
    assert await fleet.ended(service) == 0
    assert fleet.registry.get(worker_id) is None
    await fleet.pools_are_full()


async def test_a_killed_decode_worker_costs_no_token(fleet: Fleet, ask: MakeAsk) -> None:
    question = ask(55, 100)
    stream = await fleet.gateway.dispatcher.submit(question.request)
    async for _ in stream:
        if len(stream.state.choices[0].tokens) == 5:
            fleet.services[stream.route["decode"]].kill(signal.SIGKILL)
    assert stream.state.choices[0].tokens == question.expected
    assert stream.usage.num_completion_tokens == len(question.expected)
    await fleet.pools_are_full(30)


async def test_a_prefill_worker_killed_with_a_prompt_costs_no_token(fleet: Fleet, ask: MakeAsk) -> None:
    """The last prefill worker dies before it has computed the prompt: decode computes it."""
    question, in_flight = ask(400, 20), fleet.gateway.dispatcher.router.in_flight
    service = fleet.services["prefill-0"]
    service.kill(signal.SIGSTOP)
    pending = asyncio.create_task(fleet.gateway.dispatcher.submit(question.request))
    await until(lambda: in_flight.total() > 0, 10)
    service.kill(signal.SIGKILL)
    assert await finish(await pending) == question.expected
    await fleet.pools_are_full(30)

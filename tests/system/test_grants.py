"""Two gateways and one small worker: each account has its share of the device, and no request is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from tests.system.conftest import SMALL
from tests.system.fleet import START_SECONDS, Fleet, token_request, until

SEATS = 3
PROMPT_TOKENS, ANSWER_TOKENS = 24, 16


class Clients:
    """Clients of one account at one gateway: each asks again once it has its answer."""

    def __init__(self, gateway: Gateway, account: str, num: int) -> None:
        self._dispatcher = gateway.dispatcher
        self._account = account
        self.num_tokens = self.num_answers = self.num_calls = 0
        self.tasks = [asyncio.create_task(self._ask(range(number * 7, 1000, num))) for number in range(num)]

    async def _ask(self, firsts: range) -> None:
        for turn in count():
            first = 1 + firsts[turn % len(firsts)]
            prompt = range(first, first + PROMPT_TOKENS)
            request = token_request("@tandem/demo", prompt, ANSWER_TOKENS, account=self._account, cacheable=False)
            stream = await self._dispatcher.submit(request)
            async for _ in stream:
                pass
            usage = stream.state.usage
            self.num_tokens += usage.num_computed_tokens + usage.num_completion_tokens
            self.num_calls += len(stream.state.history.calls)
            self.num_answers += 1

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def other_folder(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir(mode=0o700)
    return tmp_path / "other"


@asynccontextmanager
async def second_gateway(folder: Path) -> AsyncIterator[tuple[Gateway, asyncio.Event]]:
    """A gateway beside the fleet's own, until it is told to end."""
    ports = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "enrolment_listen": "127.0.0.1:0"}
    probes = {"probe_interval_seconds": 600.0, "probe_valid_seconds": 3600.0}
    settings = ControlPlaneSettings(**ports, **probes, state_dir=str(folder), budgets=("*=0/0",))  # type: ignore[arg-type]
    gateway, drain = Gateway(settings), asyncio.Event()
    running = asyncio.create_task(gateway.run(drain))
    try:
        await asyncio.wait_for(gateway.started.wait(), START_SECONDS)
        yield gateway, drain
    finally:
        drain.set()
        await running


async def test_two_gateways_share_a_worker_by_accounts_and_one_that_ends_leaves_all_to_the_other(
    tmp_path: Path, other_folder: Path
) -> None:
    async with Fleet(tmp_path, local_prefill="auto") as fleet, second_gateway(other_folder) as (other, drain):
        one = fleet.gateway
        control = f"{one.grpc_address},{other.grpc_address}"
        fleet.start("decode", "decode-0", *SMALL, "--max-num-seqs", str(SEATS), "--control", control)
        await fleet.ready()
        await until(lambda: bool(other.dispatcher.rooms.num_granted()), 30)
        greedy, small = Clients(one, "greedy", 16), Clients(other, "small", 5)
        try:
            await until(lambda: greedy.num_answers + small.num_answers >= 20, 60)
            before = [clients.num_tokens for clients in (greedy, small)]
            await until(lambda: greedy.num_answers + small.num_answers >= 150, 120)
            used = [clients.num_tokens - num for clients, num in zip((greedy, small), before, strict=True)]
            assert used[1] / sum(used) == pytest.approx(0.5, abs=0.05)
            assert [clients.num_calls for clients in (greedy, small)] == [greedy.num_answers, small.num_answers]
            await small.leave()
            drain.set()
            await until(lambda: len(one.dispatcher.queue) == 16 - (SEATS + 1), 60)
        finally:
            await asyncio.gather(greedy.leave(), small.leave())

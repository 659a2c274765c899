"""Two gateways and the front of one small worker, over real streams: each account gets its share, and none resends."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_worker.grant_sender import GrantSender
from tandem_worker.worker_room import PoolRoom
from tests.control_plane.dispatch.shared_worker import AskingGateway, SharedWorker, granted
from tests.control_plane.harness import PROMPT, new_request, tokens_of
from tests.tandem_worker.kv_harness import until
from tests.tandem_worker.scripted_engine import output

SEATS, BLOCKS, BLOCK_TOKENS = 4, 64, 16
ANSWER = 5


class Device(SharedWorker):
    """A worker whose engine takes a few requests, and computes one answer whenever it is told to."""

    def __init__(self) -> None:
        settings = {"max_num_seqs": str(SEATS)}
        super().__init__(GrantSender(PoolRoom(SEATS)), worker_id="w", role=pb.WORKER_ROLE_DECODE, settings=settings)
        self.running: deque[messages.AddRequest] = deque()
        self.num_submitted = self.num_refused = 0
        self.used: Counter[str] = Counter()
        """Device tokens by account."""
        self.engine.answer = self._command

    @property
    def stats(self) -> messages.EngineStats:
        num_used = sum(-(-len(each.token_ids) // BLOCK_TOKENS) for each in self.running)
        return messages.EngineStats(len(self.running), 0, 0, BLOCKS, BLOCKS - num_used, 0, num_used, 0, {})

    def compute(self, num_answers: int) -> None:
        """Finish the oldest answers."""
        for _ in range(min(num_answers, len(self.running))):
            request = self.running.popleft()
            self.used[request.fairness_key] += len(request.token_ids) + ANSWER
            last = output(request.request_id, len(request.token_ids), [7] * ANSWER, is_last=True)
            self._step([request.request_id], [last])

    def _command(self, command: Any) -> None:
        if isinstance(command, messages.AbortRequest):
            self.running = deque(each for each in self.running if each.request_id != command.request_id)
            self.engine.emit(messages.RequestAborted(command.request_id))
            self._step([], [])
        if not isinstance(command, messages.AddRequest):
            return
        self.num_submitted += 1
        if len(self.running) > SEATS:
            self.num_refused += 1
            self.engine.emit(messages.Refused(command.request_id, "kv_full", "no room"))
            return
        self.running.append(command)
        self.engine.emit(messages.Reserved(command.request_id, 0))

    def _step(self, admitted: list[str], outputs: Sequence[messages.RequestOutput]) -> None:
        self.engine.emit(messages.StepDone(1, list(outputs), [], self.stats, admitted=admitted))


@asynccontextmanager
async def fleet(num_gateways: int) -> AsyncIterator[tuple[Device, list[AskingGateway]]]:
    device = Device()
    await device.load_pool(BLOCKS)
    async with device.served():
        gateways = [AskingGateway(device) for _ in range(num_gateways)]
        async with granted(gateways):
            yield device, gateways


async def serve(device: Device, num_tokens: int) -> Counter[str]:
    """Compute answers, one at a time and never with an empty seat, until so many device tokens are used."""
    before = Counter(device.used)
    while (device.used - before).total() < num_tokens:
        await until(lambda: len(device.running) >= SEATS)
        device.compute(1)
    return device.used - before


async def warm_up(device: Device) -> None:
    """Bring the worker beyond its slow start."""
    for num_running in (1, 2, 3):
        await until(lambda num=num_running: len(device.running) >= num)  # type: ignore[misc]
        device.compute(1)
    await until(lambda: len(device.running) > SEATS)


TURN = len(PROMPT) + ANSWER


async def test_accounts_get_their_shares_whichever_gateways_they_ask_and_no_prompt_is_sent_twice() -> None:
    async with fleet(2) as (device, (one, other)):
        one.begin("greedy", 30, ANSWER)
        other.begin("greedy", 15, ANSWER)
        other.begin("small", 8, ANSWER)
        await warm_up(device)
        await serve(device, 20 * TURN)
        used = await serve(device, 200 * TURN)
        assert used["small"] / used.total() == pytest.approx(0.5, abs=0.05)
        assert device.num_refused == 0


async def test_two_gateways_with_an_account_each_have_half_each_however_many_requests_they_have() -> None:
    async with fleet(2) as (device, (one, other)):
        one.begin("a", 40, ANSWER)
        other.begin("b", 10, ANSWER)
        await warm_up(device)
        await serve(device, 20 * TURN)
        used = await serve(device, 200 * TURN)
        assert used["a"] / used.total() == pytest.approx(0.5, abs=0.05)
        num_open = device.num_submitted - device.used.total() // TURN
        assert num_open == len(device.running) and device.num_refused == 0


async def test_a_gateway_that_dies_leaves_all_the_room_to_the_other() -> None:
    async with fleet(2) as (device, (one, other)):
        one.begin("a", 20, ANSWER)
        other.begin("b", 20, ANSWER)
        await warm_up(device)
        await serve(device, 20 * TURN)
        await one.kill()
        await until(lambda: len(device.running) > SEATS and {each.fairness_key for each in device.running} == {"b"})
        used = await serve(device, 40 * TURN)
        assert used["a"] == 0 and device.num_refused == 0


async def test_a_request_for_more_answers_than_a_new_worker_grants_has_its_turn_once_the_worker_is_idle() -> None:
    async with fleet(1) as (device, (gateway,)):
        request = new_request(ANSWER, num_choices=SEATS + 1, model_id="m", account="a")
        asked = asyncio.create_task(gateway.dispatcher.submit(request))
        await until(lambda: len(device.running) == SEATS + 1)
        device.compute(SEATS + 1)
        assert await tokens_of(await asked) == [[7] * ANSWER] * (SEATS + 1)
        assert device.num_refused == 0

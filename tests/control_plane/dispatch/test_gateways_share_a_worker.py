"""Two gateways and the front of one small worker, over real streams: each account gets its share, and none resends."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_engine import messages
from tandem_runtime.server import GrpcServer
from tandem_worker.grant_sender import GrantSender
from tandem_worker.model_card import AssetStore
from tandem_worker.service import WorkerService
from tests.control_plane.harness import PROMPT, Harness, new_request, tokens_of
from tests.control_plane.scripted_worker import kv_load, kv_service
from tests.tandem_worker.kv_harness import until
from tests.tandem_worker.scripted_engine import output, ready
from tests.tandem_worker.test_front import Harness as WorkerHarness

SEATS, BLOCKS, BLOCK_TOKENS = 4, 64, 16
ANSWER = 5


class Device(WorkerHarness):
    """A worker whose engine takes a few requests, and computes one answer whenever it is told to."""

    def __init__(self) -> None:
        super().__init__(grants=GrantSender(SEATS))
        self.running: deque[messages.AddRequest] = deque()
        self.num_submitted = self.num_refused = 0
        self.used: Counter[str] = Counter()
        """Device tokens by account."""
        self.engine.answer = self._command

    async def load(self) -> None:
        self.engine.emit(msgspec.structs.replace(ready(), num_blocks=BLOCKS))
        await asyncio.wait_for(self.is_ready.wait(), 10)

    def info(self) -> pb.WorkerInfo:
        return pb.WorkerInfo(
            worker_id="w",
            incarnation="worker-1",
            role=pb.WORKER_ROLE_DECODE,
            address=self.address,
            host_id="host-a",
            card=self.front.card,
            settings={"max_num_seqs": str(SEATS)},
        )

    address = ""

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


class Gateway(Harness):
    """A gateway with clients of one account, each of which asks again once it has its answer."""

    def __init__(self, device: Device) -> None:
        super().__init__(queue_seconds=60.0, local_prefill="never", budget=None, accept_seconds=30.0, max_waiting=200)
        self._device = device
        self.registry.register(kv_service(), kv_load())
        self.registry.register(device.info(), pb.LoadReport(state=pb.WORKER_STATE_READY))
        self.clients: list[asyncio.Task[None]] = []

    def card(self, name: str) -> pb.ModelCard:
        assert self._device.front.card is not None, "loaded"
        return self._device.front.card

    def begin(self, account: str, num_clients: int) -> None:
        self.clients += [asyncio.create_task(self._ask(account, number)) for number in range(num_clients)]

    async def _ask(self, account: str, client: int) -> None:
        for turn in range(10_000):
            name = f"{account}-{client}-{turn}"
            request = new_request(ANSWER, request_id=name, account=account, model_id="m", fairness_key=account)
            await tokens_of(await self.dispatcher.submit(request))

    async def kill(self) -> None:
        for client in self.clients:
            client.cancel()
        await self.links.close()
        await asyncio.gather(*self.clients, return_exceptions=True)
        await self.dispatcher.close()


@asynccontextmanager
async def fleet(num_gateways: int) -> AsyncIterator[tuple[Device, list[Gateway]]]:
    device = Device()
    await device.load()
    service = WorkerService(device.front, AssetStore(), pb.WorkerInfo)
    server = GrpcServer(
        "127.0.0.1:0", lambda grpc: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, grpc), []
    )
    device.address = await server.start()
    gateways = [Gateway(device) for _ in range(num_gateways)]
    try:
        await until(lambda: all(_has_grant(gateway) for gateway in gateways))
        yield device, gateways
    finally:
        for gateway in gateways:
            await gateway.kill()
        await server.stop(0)
        await device.front.close()
        await asyncio.wait_for(device.pump, 10)


def _has_grant(gateway: Gateway) -> bool:
    """Whether a first grant has come: until then a gateway sends some requests unasked, which may be refused."""
    attachment = gateway.links.attachment("worker-1")
    return attachment is not None and attachment.left() is not None


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
        one.begin("greedy", 30)
        other.begin("greedy", 15)
        other.begin("small", 8)
        await warm_up(device)
        await serve(device, 20 * TURN)
        used = await serve(device, 200 * TURN)
        assert used["small"] / used.total() == pytest.approx(0.5, abs=0.05)
        assert device.num_refused == 0


async def test_two_gateways_with_an_account_each_have_half_each_however_many_requests_they_have() -> None:
    async with fleet(2) as (device, (one, other)):
        one.begin("a", 40)
        other.begin("b", 10)
        await warm_up(device)
        await serve(device, 20 * TURN)
        used = await serve(device, 200 * TURN)
        assert used["a"] / used.total() == pytest.approx(0.5, abs=0.05)
        num_open = device.num_submitted - device.used.total() // TURN
        assert num_open == len(device.running) and device.num_refused == 0


async def test_a_gateway_that_dies_leaves_all_the_room_to_the_other() -> None:
    async with fleet(2) as (device, (one, other)):
        one.begin("a", 20)
        other.begin("b", 20)
        await warm_up(device)
        await serve(device, 20 * TURN)
        await one.kill()
        await until(lambda: len(device.running) > SEATS and {each.fairness_key for each in device.running} == {"b"})
        used = await serve(device, 40 * TURN)
        assert used["a"] == 0 and device.num_refused == 0


async def test_a_request_for_more_answers_than_a_new_worker_grants_has_its_turn_once_the_worker_is_idle() -> None:
    async with fleet(1) as (device, (gateway,)):
        request = new_request(ANSWER, num_choices=SEATS + 1, model_id="m", fairness_key="a")
        asked = asyncio.create_task(gateway.dispatcher.submit(request))
        await until(lambda: len(device.running) == SEATS + 1)
        device.compute(SEATS + 1)
        assert await tokens_of(await asked) == [[7] * ANSWER] * (SEATS + 1)
        assert device.num_refused == 0

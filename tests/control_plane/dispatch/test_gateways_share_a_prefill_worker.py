"""Two gateways and the front of one prefill worker, over real streams: a short queue there, in a fair order."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane.generation import NOTHING
from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_worker.grant_sender import GrantSender
from tandem_worker.worker_room import PromptRoom
from tests.control_plane.dispatch.shared_worker import AskingGateway, SharedWorker, granted
from tests.control_plane.harness import PROMPT
from tests.control_plane.scripted_worker import AttachStream, ScriptedWorker, finish, token_at
from tests.tandem_worker.kv_harness import until
from tests.tandem_worker.scripted_engine import output

SEATS, QUEUE, STEP, RATE = 8, 64, 40, 800
WINDOW = RATE // 2
LONG, MIDDLE = tuple(range(1, 101)) * 5, tuple(range(1, 101))
NUM = len(PROMPT)
ANSWER = RATE // 100
"""An answer's token is assumed to take 10 ms: so many tokens of prompts."""


class Device(SharedWorker):
    """A prefill worker whose engine computes a step whenever it is told to, in the order of arrival."""

    def __init__(self) -> None:
        grants = GrantSender(PromptRoom(SEATS * 4, QUEUE, STEP))
        super().__init__(grants, worker_id="p", role=pb.WORKER_ROLE_PREFILL, kv_address="127.0.0.1:1")
        self.connector.mode = lambda submit: "prefill"  # type: ignore[method-assign]
        self.queue: deque[tuple[messages.AddRequest, int]] = deque()
        """Requests, and the tokens that are left to compute of each."""
        self.num_refused = self.num_steps = self.most_left = 0
        self.used: Counter[str] = Counter()
        """Device time by account, that of the answers included, in tokens of prompts."""
        self.is_computed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.engine.answer = self._command

    @property
    def num_left(self) -> int:
        return sum(num for _, num in self.queue)

    def step(self) -> None:
        budget, outputs = STEP, []
        while self.queue and budget:
            request, num_left = self.queue.popleft()
            num = min(budget, num_left)
            budget -= num
            self.used[request.fairness_key] += num
            if num < num_left:
                self.queue.appendleft((request, num_left - num))
                continue
            self.used[request.fairness_key] += ANSWER
            size = len(request.token_ids)
            outputs.append(output(request.request_id, size, [token_at(size)], is_last=True))
            self.is_computed[request.request_id.partition(".")[0]].set()
        self.num_steps += 1
        counters = {
            "prompt_tokens_computed": float(STEP * self.num_steps),
            "step_seconds": STEP * self.num_steps / RATE,
        }
        stats = messages.EngineStats(len(self.queue), 0, self.num_left, 1000, 1000, 0, 0, 0, counters)
        self.engine.emit(messages.StepDone(self.num_steps, outputs, [], stats, admitted=[]))

    def _command(self, command: Any) -> None:
        if isinstance(command, messages.AbortRequest):
            self.queue = deque(each for each in self.queue if each[0].request_id != command.request_id)
            self.engine.emit(messages.RequestAborted(command.request_id))
        if not isinstance(command, messages.AddRequest):
            return
        if len(self.queue) >= QUEUE:
            self.num_refused += 1
            self.engine.emit(messages.Refused(command.request_id, "queue_full", "no room"))
            return
        self.queue.append((command, len(command.token_ids)))
        self.most_left = max(self.most_left, self.num_left)
        self.engine.emit(messages.Reserved(command.request_id, 0))


class Gateway(AskingGateway):
    """Its decode worker answers once the prompt is computed."""

    def __init__(self, device: Device, decode: ScriptedWorker) -> None:
        super().__init__(device)
        self.registry.register(decode.info(card=device.card), decode.load())

    def ask(self, account: str, num_clients: int, prompt: tuple[int, ...] = PROMPT) -> None:
        self.begin(account, num_clients, 1, token_ids=prompt, cache=NOTHING)


class Fleet:
    def __init__(self, device: Device, gateways: list[Gateway]) -> None:
        self.device, self.gateways = device, gateways

    async def serve(self, num_steps: int) -> Counter[str]:
        """Compute full steps; each gateway has the answers of one before the next."""
        before = Counter(self.device.used)
        for _ in range(num_steps):
            await until(lambda: self.device.num_left >= STEP)
            self.device.step()
            await asyncio.sleep(0)
        return self.device.used - before

    async def warm_up(self) -> None:
        """Bring the worker beyond its slow start."""
        for num in (1, 2, 4, 8):
            await until(lambda num=num: self.device.num_left >= num * STEP or len(self.device.queue) >= num)  # type: ignore[misc]
            self.device.step()


@asynccontextmanager
async def fleet(num_gateways: int = 2) -> AsyncIterator[Fleet]:
    device = Device()
    await device.load_pool(1000)

    async def decode_once_computed(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        await device.is_computed[submit.request_id.rpartition("-")[0]].wait()
        await finish(worker, attach, submit)

    async with device.served():
        decode = await ScriptedWorker("d", behave=decode_once_computed).start()
        gateways = [Gateway(device, decode) for _ in range(num_gateways)]
        try:
            async with granted(gateways):
                yield Fleet(device, gateways)
        finally:
            await decode.kill()


async def test_an_account_has_its_share_of_prefill_whichever_gateways_it_asks_and_the_queue_is_short() -> None:
    async with fleet() as here:
        one, other = here.gateways
        one.ask("greedy", 40)
        other.ask("greedy", 20)
        other.ask("small", 30)
        await here.warm_up()
        await here.serve(20)
        here.device.most_left = 0
        used = await here.serve(200)
        assert used["small"] / used.total() == pytest.approx(0.5, abs=0.05)
        assert here.device.most_left <= WINDOW and here.device.num_refused == 0


async def test_prompts_longer_than_the_window_have_their_turn_beside_small_ones_and_never_two_at_once() -> None:
    assert len(LONG) > WINDOW
    async with fleet() as here:
        one, other = here.gateways
        one.ask("long", 3, LONG)
        other.ask("short", 30)
        await here.warm_up()
        await here.serve(20)
        here.device.most_left = 0
        used = await here.serve(200)
        assert used["long"] / used.total() == pytest.approx(0.5, abs=0.07)
        assert here.device.most_left <= WINDOW // 2 + len(LONG) and here.device.num_refused == 0


async def test_a_gateway_that_is_killed_leaves_all_of_prefill_to_the_other() -> None:
    async with fleet() as here:
        one, other = here.gateways
        one.ask("a", 30, MIDDLE)
        other.ask("b", 30, MIDDLE)
        await here.warm_up()
        await here.serve(10)
        await one.kill()
        await until(lambda: {request.fairness_key for request, _ in here.device.queue} <= {"b"})
        used = await here.serve(50)
        assert used["a"] == 0 and here.device.num_refused == 0

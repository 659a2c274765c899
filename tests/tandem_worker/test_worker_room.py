"""A prefill worker's room is what it computes in half a second, less what is left to compute."""

from __future__ import annotations

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import EngineStats
from tandem_runtime.errors import InvalidRequest, Overloaded
from tandem_worker.process import granted_room
from tandem_worker.requests import ActiveRequest, GatewayStream
from tandem_worker.settings import WorkerSettings
from tandem_worker.worker_room import FULL_SECONDS, PoolRoom, PromptRoom

BLOCKS, BLOCK_TOKENS = 1000, 16
RATE, STEP = 10_000, 512
WINDOW = RATE // 2


class Worker:
    """A prefill worker beyond its slow start, that has computed for a while at its usual rate."""

    def __init__(self, max_num_waiting: int = 256) -> None:
        self.room = PromptRoom(64, max_num_waiting, STEP)
        self.num_left = self.num_steps = 0
        self.room.opened(self.stats(), BLOCK_TOKENS)
        for number in range(8):
            self.room.answered(request := self.come(f"first-{number}", 1))
            self.room.ended(request)
        self.step()

    def stats(self) -> EngineStats:
        counters = {
            "prompt_tokens_computed": float(self.num_steps * STEP),
            "step_seconds": self.num_steps * STEP / RATE,
        }
        return EngineStats(1, 0, self.num_left, BLOCKS, BLOCKS, 0, 0, 0, counters)

    def come(self, name: str, num_tokens: int) -> ActiveRequest:
        submit = pb.Submit(request_id=name, grant_tokens=num_tokens, time_left_ms=10_000)
        request = ActiveRequest(submit, GatewayStream())
        self.room.began(request)
        return request

    def step(self, num_left: int = 0) -> None:
        self.num_left, self.num_steps = num_left, self.num_steps + 1
        self.room.stepped(self.stats(), [])

    def now(self, now: float = 0.0) -> tuple[int, bool]:
        room = self.room.room(now)
        return room.num_tokens, room.takes_any


def test_the_window_is_half_a_second_at_the_measured_rate_and_two_steps_at_least() -> None:
    assert PromptRoom(64, 256, STEP).window == 4096 and PromptRoom(64, 256, 8192).window == 16384
    worker = Worker()
    assert worker.room.window == WINDOW
    assert worker.now() == (WINDOW, True)
    for _ in range(200):
        worker.num_steps += 1
        stats = worker.stats()
        stats.counters["step_seconds"] *= 100
        worker.room.stepped(stats, [])
    assert worker.room.window == 2 * STEP, "a slow worker"


def test_what_has_come_takes_room_until_it_is_computed_whether_the_engine_has_told_of_it_or_not() -> None:
    worker = Worker()
    one = worker.come("one", 2000)
    assert worker.now() == (WINDOW - 2000, True)
    worker.room.reserved(one, "prefill")
    worker.come("other", 1000)
    assert worker.now() == (WINDOW - 3000, False)
    worker.step(2000 - STEP)
    assert worker.now() == (WINDOW - 3000 + STEP, True), "the other is not in these stats"
    worker.room.answered(one)
    assert worker.now() == (WINDOW - 1000, True)


def test_what_is_cached_of_a_prompt_that_waits_takes_no_room() -> None:
    worker = Worker()
    request = worker.come("mostly cached", 100)
    worker.room.reserved(request, "prefill")
    worker.step(8000)
    assert worker.now() == (WINDOW - 100, True)
    worker.room.ended(request)
    assert worker.now() == (WINDOW, True)


def test_a_prompt_longer_than_the_window_is_taken_once_half_a_window_is_left() -> None:
    worker = Worker()
    request = worker.come("long", 16_000)
    worker.room.reserved(request, "prefill")
    for num_left, expected in ((16_000, (0, False)), (WINDOW, (0, False)), (WINDOW // 2, (WINDOW // 2, True))):
        worker.step(num_left)
        assert worker.now() == expected


def test_a_worker_that_has_refused_takes_nothing_until_one_ends_or_some_time_has_passed() -> None:
    worker = Worker()
    kept, refused = worker.come("kept", 10), worker.come("refused", 10)
    worker.room.ended(refused)
    worker.room.refused(refused, Overloaded("full"), 1.0)
    assert worker.now(1.0) == (0, False) and not worker.room.room(1.0).num_requests
    assert worker.now(1.0 + FULL_SECONDS) == (WINDOW - 10, True)
    worker.room.ended(kept)
    assert worker.now(1.0) == (WINDOW, True)


def test_a_request_that_is_wrong_or_larger_than_the_pool_closes_a_worker_for_nobody() -> None:
    worker = Worker()
    worker.come("kept", 10)
    for number, error in ((10, InvalidRequest("wrong")), (10**9, Overloaded("larger than the pool"))):
        refused = worker.come("refused", number)
        worker.room.ended(refused)
        worker.room.refused(refused, error, 1.0)
        assert worker.now(1.0) == (WINDOW - 10, True)


def test_no_more_requests_are_taken_than_the_engine_queues() -> None:
    worker = Worker(max_num_waiting=3)
    numbers = []
    for number in range(4):
        numbers.append(worker.room.room(0.0).num_requests)
        worker.come(str(number), 10)
    assert numbers == [3, 2, 1, 0]


def test_prefill_workers_grant_time_unless_told_not_to_and_decode_workers_grant_memory_in_any_case() -> None:
    on, off = WorkerSettings(prompt_grants=True), WorkerSettings(prompt_grants=False)
    assert isinstance(granted_room(on, pb.WORKER_ROLE_PREFILL), PromptRoom)
    assert granted_room(off, pb.WORKER_ROLE_PREFILL) is None
    assert isinstance(granted_room(on, pb.WORKER_ROLE_DECODE), PoolRoom)
    assert isinstance(granted_room(off, pb.WORKER_ROLE_DECODE), PoolRoom)

"""Tests that on a decode worker every class of every kind of request has its turn, whatever else comes without end.

The kinds: `local`, a prompt that this worker reads itself; `migrated`, an answer that began elsewhere; `handed`, a
prompt whose blocks come from prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem_engine.messages import Refused, Reserved, StartDecode
from tandem_engine.scheduling.waiting_queue import AGEING_SECONDS
from tests.tandem_engine.scheduling.harness import EngineHarness, slab

STEP_SECONDS = 0.25
Kind = Literal["local", "migrated", "handed"]
KINDS: tuple[Kind, ...] = ("local", "migrated", "handed")


@dataclass
class Client:
    """One request; a hand-over is offered again in every step until the worker accepts it."""

    name: str
    kind: Kind
    priority: int
    num_tokens: int
    max_tokens: int
    arrived: float
    num_choices: int = 1
    num_offers: int = 0

    @property
    def choices(self) -> list[str]:
        """The request ids of the next offer, as a gateway names them: by choice and attempt."""
        if self.num_choices == 1:
            return [self.name]
        return [f"{self.name}-{index}.{self.num_offers}" for index in range(self.num_choices)]


class Worker:
    """A decode worker and the gateways before it, one for each class; every step takes a quarter of a second."""

    def __init__(self, num_blocks: int, num_seqs: int) -> None:
        self.harness = EngineHarness(
            num_blocks,
            context_length=1024,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=1024,
            max_num_waiting=1024,
            max_prefill_tokens_with_decodes=32,
            step_seconds=lambda output: STEP_SECONDS,
        )
        self.started: dict[str, float] = {}
        """When each request was first in a step."""
        self._clients: dict[str, Client] = {}
        self._offered: list[Client] = []
        self._numbers = count()

    @property
    def now(self) -> float:
        return self.harness.runner.seconds

    def send(
        self, kind: Kind, priority: int = 0, num_tokens: int = 8, max_tokens: int = 4, num_choices: int = 1
    ) -> str:
        name = f"{kind}-{next(self._numbers)}"
        client = Client(name, kind, priority, num_tokens, max_tokens, self.now, num_choices)
        self._clients[client.name] = client
        if kind == "handed":
            self._offered.append(client)
        else:
            prompt = [1] * num_tokens
            num_prompt_tokens = num_tokens if kind == "local" else max(1, num_tokens - 2)
            (event,) = self.harness.add(
                client.name, prompt, max_tokens=max_tokens + 2, priority=priority, num_prompt_tokens=num_prompt_tokens
            )
            assert isinstance(event, Reserved)
        return client.name

    def num_waiting(self, kind: Kind, priority: int) -> int:
        """Count the requests of a class that were sent and have not been in a step."""
        return sum((client.kind, client.priority) == (kind, priority) for client in self.waiting)

    @property
    def waiting(self) -> Iterable[Client]:
        return [client for name, client in self._clients.items() if name not in self.started]

    def step(self) -> None:
        self._offer()
        if not self.harness.core.has_work():
            self.harness.runner.seconds += STEP_SECONDS
            return
        num_steps = len(self.harness.runner.steps)
        now = self.now
        self.harness.step()
        if len(self.harness.runner.steps) == num_steps:  # nothing could run: time passes nevertheless
            self.harness.runner.seconds += STEP_SECONDS
            return
        for name, _, _ in self.harness.last_runs():
            self.started.setdefault(name.partition(".")[0], now)

    def _offer(self) -> None:
        """Offer the first hand-over of each class; the next one too, once that is accepted."""
        refused: set[int] = set()
        for client in list(self._offered):
            if client.priority in refused:
                continue
            if self._is_accepted(client):
                self._offered.remove(client)
            else:
                refused.add(client.priority)

    def _is_accepted(self, client: Client) -> bool:
        """Offer all choices together; take back those that were accepted if one is refused."""
        client.num_offers += 1
        prompt, choices = [1] * client.num_tokens, client.choices
        accepted = []
        for choice in choices:
            (event,) = self.harness.add(
                choice,
                prompt,
                mode="decode",
                max_tokens=client.max_tokens,
                priority=client.priority,
                choice_of=client.name,
                attempt=client.num_offers,
            )
            assert isinstance(event, Reserved) or (isinstance(event, Refused) and event.reason == "kv_full")
            accepted += [choice] if isinstance(event, Reserved) else []
        if len(accepted) < len(choices):
            for choice in accepted:
                self.harness.core.scheduler.abort(choice)
            return False
        for choice in choices:
            self.harness.core.handle(slab(choice, 0, range(-(-client.num_tokens // 4))))
            self.harness.core.handle(StartDecode(choice, [1000 + client.num_tokens]))
        return True


def flood(worker: Worker, kind: Kind, priority: int, num_tokens: int = 8, max_tokens: int = 4, depth: int = 2) -> None:
    """Take a step in which `depth` requests of a class wait."""
    while worker.num_waiting(kind, priority) < depth:
        worker.send(kind, priority, num_tokens, max_tokens)
    worker.step()


@pytest.mark.parametrize(("num_blocks", "num_seqs"), [(200, 64), (4000, 8)], ids=["few blocks", "few seats"])
@pytest.mark.parametrize("priority", [5, 0, -5])
def test_a_long_prompt_has_its_turn_while_hand_overs_come_without_end(
    num_blocks: int, num_seqs: int, priority: int
) -> None:
    worker = Worker(num_blocks, num_seqs)
    for number in range(40):  # they end one by one
        flood(worker, "handed", 0, num_tokens=48, max_tokens=12 + number % 9, depth=1 if num_seqs > 8 else 6)
    name = worker.send("local", priority, num_tokens=400)
    since = worker.now
    for number in range(100):
        flood(worker, "handed", 0, num_tokens=48, max_tokens=12 + number % 9, depth=6)
    assert name in worker.started
    assert worker.started[name] - since <= AGEING_SECONDS + 20 * STEP_SECONDS + 1


@pytest.mark.parametrize("others", KINDS)
@pytest.mark.parametrize("priority", [0, -5])
def test_a_long_hand_over_has_its_turn_while_others_come_without_end(others: Kind, priority: int) -> None:
    worker = Worker(num_blocks=60, num_seqs=64)
    for _ in range(20):
        flood(worker, others, 1, num_tokens=12, max_tokens=6, depth=8)
    name = worker.send("handed", priority, num_tokens=160)
    since = worker.now
    for _ in range(100):
        flood(worker, others, 1, num_tokens=12, max_tokens=6, depth=8)
    assert name in worker.started
    assert worker.started[name] - since <= AGEING_SECONDS + 12 * STEP_SECONDS + 1


@pytest.mark.parametrize("others", KINDS)
@pytest.mark.parametrize(("num_choices", "num_tokens"), [(2, 80), (4, 40), (8, 20)])
def test_the_choices_of_a_hand_over_have_one_turn_together(others: Kind, num_choices: int, num_tokens: int) -> None:
    worker = Worker(num_blocks=60, num_seqs=64)
    for _ in range(20):
        flood(worker, others, 1, num_tokens=12, max_tokens=6, depth=8)
    name = worker.send("handed", 0, num_tokens, num_choices=num_choices)
    since = worker.now
    for _ in range(100):
        flood(worker, others, 1, num_tokens=12, max_tokens=6, depth=8)
    begun = [worker.started.get(f"{name}-{index}") for index in range(num_choices)]
    assert all(at is not None and at - since <= AGEING_SECONDS + 12 * STEP_SECONDS + 1 for at in begun), begun


def test_an_answer_of_a_lower_class_has_a_seat_while_higher_ones_come_without_end() -> None:
    worker = Worker(num_blocks=400, num_seqs=2)
    for _ in range(4):
        flood(worker, "handed", 3, depth=8)
    names = [worker.send("handed", 0) for _ in range(2)]
    since = worker.now
    for _ in range(100):
        flood(worker, "handed", 3, depth=8)
    assert [worker.started[name] - since for name in names] == [
        pytest.approx(turn * AGEING_SECONDS, abs=4 * STEP_SECONDS) for turn in (1, 2)
    ]


def test_an_answer_of_a_higher_class_takes_a_seat_at_once_and_gives_it_back() -> None:
    worker = Worker(num_blocks=400, num_seqs=2)
    low = [worker.send("handed", 0, max_tokens=40) for _ in range(2)]
    worker.step()
    high = worker.send("handed", 3, max_tokens=4)
    for _ in range(60):
        worker.step()
    steps = [{name for name, _, _ in step} for step in worker.harness.runner.steps]
    assert steps[0] == set(low)
    assert steps[1:4] == [{low[0], high}] * 3
    assert steps[4] == set(low)
    worker.harness.assert_nothing_is_left()


def test_a_hand_over_that_is_not_offered_again_holds_nobody_back() -> None:
    worker = Worker(num_blocks=60, num_seqs=64)
    worker.harness.add("its blocks do not come", [1] * 100, mode="decode")
    worker.send("handed", num_tokens=160)
    while not worker.harness.core.is_held():  # its turn has come, and everything else has ended
        flood(worker, "local", 0, num_tokens=8, max_tokens=4)
    assert worker.now <= AGEING_SECONDS + 10 * STEP_SECONDS
    worker.step()
    assert not worker.harness.core.has_work()
    worker.harness.runner.seconds += 3.0
    assert worker.harness.core.has_work(), "nobody offers it: the queue goes on without a command"
    worker.harness.run()
    worker.harness.core.scheduler.abort("its blocks do not come")
    worker.harness.assert_nothing_is_left()


Shape = tuple[Kind, int, int, int]
"""Kind, class, prompt tokens, answer tokens."""

SHAPES = st.tuples(st.sampled_from(KINDS), st.integers(-1, 1), st.integers(1, 40), st.integers(2, 6))
ARRIVALS = st.lists(st.tuples(st.integers(0, 60), SHAPES), min_size=1, max_size=8)
TURN_SECONDS = 3 * (AGEING_SECONDS + 9 * 12 * STEP_SECONDS)
"""Three classes, each with an ageing time and with an answer of the longest kind on each seat before it."""


@settings(max_examples=300, deadline=None)
@given(ARRIVALS, st.lists(SHAPES, max_size=3), st.integers(1, 4), st.integers(16, 40))
@example(  # running requests grow into the blocks that were kept for the queue's head
    [(19, ("migrated", 0, 13, 5))], [("migrated", 1, 39, 3), ("handed", 1, 30, 6), ("migrated", 1, 35, 5)], 2, 37
)
@example(  # preempted requests take the turns of those that wait
    [(29, ("local", 0, 9, 2))], [("handed", 0, 18, 6), ("local", 1, 30, 4), ("migrated", -1, 8, 4)], 4, 17
)
@example(  # the hand-over accepted last grows, too
    [(6, ("migrated", 1, 15, 4))], [("handed", -1, 23, 6), ("handed", 0, 6, 6), ("migrated", 0, 27, 2)], 1, 23
)
def test_whoever_is_nth_of_its_class_begins_within_n_turns(
    arrivals: list[tuple[int, Shape]], floods: list[Shape], num_seqs: int, num_blocks: int
) -> None:
    worker = Worker(num_blocks, num_seqs)
    due: dict[str, float] = {}
    pending = sorted(arrivals, reverse=True)
    for step in count():
        while pending and pending[-1][0] <= step:
            _, (kind, priority, num_tokens, max_tokens) = pending.pop()
            num_ahead = sum(client.priority == priority for client in worker.waiting)
            name = worker.send(kind, priority, num_tokens, max_tokens)
            due[name] = worker.now + (num_ahead + 1) * TURN_SECONDS
        for kind, priority, num_tokens, max_tokens in floods:
            while worker.num_waiting(kind, priority) < 2:
                worker.send(kind, priority, num_tokens, max_tokens)
        worker.step()
        late = [name for name in due if name not in worker.started and worker.now > due[name]]
        assert not late, f"after {step} steps"
        if not pending and all(name in worker.started for name in due):
            return

"""Tests random sequences of commands: every request ends with the right tokens, and every block comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tandem_engine.core import RequestsFailed
from tandem_engine.messages import (
    AbortRequest,
    Command,
    EngineEvent,
    Mode,
    PrefixBlock,
    Recompute,
    ReleaseHeld,
    RequestFailed,
    RequestOutput,
    Reserved,
    StartDecode,
    StepDone,
)
from tandem_engine.scheduling.request import Request, RequestState
from tandem_engine.scheduling.speculation.drafters import Draft
from tandem_engine.scheduling.window_groups import blocks_of, most_blocks
from tests.tandem_engine.scheduling.harness import ROOT, STOP, EngineHarness, extent, kv_of, slab

SHORT, LONG = 24, 72
"""Tokens of context."""


def keys_of(packed: bytes) -> set[bytes]:
    return {packed[start : start + 8] for start in range(0, len(packed), 8)}


@dataclass
class Expected:
    """A request as its client sees it."""

    mode: Mode
    prompt: list[int]
    max_tokens: int
    num_choices: int
    answer: list[int] = field(default_factory=list)
    num_last: int = 0


class Drafting:
    """Proposes right and wrong drafts at random."""

    def __init__(self, token_at: Callable[[int], int]) -> None:
        self._token_at = token_at
        self._random = random.Random(0)

    def draft(self, request: Request, max_tokens: int) -> Draft | None:
        num_tokens = self._random.randint(0, max_tokens)
        positions = range(request.num_tokens, request.num_tokens + num_tokens)
        token_ids = [self._token_at(each) if self._random.random() < 0.8 else 7 for each in positions]
        return Draft(token_ids, 16) if token_ids else None

    def forget(self, request: Request) -> None:
        pass


class EngineMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(6, 12),
        budget=st.integers(1, 12),
        num_seqs=st.integers(1, 4),
        chunk=st.sampled_from([1, 4, 64]),
        window=st.none() | st.integers(1, 12),
        max_draft_tokens=st.sampled_from([0, 1, 5]),
        num_window_groups=st.integers(0, 2),
        context_length=st.sampled_from([SHORT, LONG]),
        copy_seconds=st.sampled_from([0.0, 0.011]),
        overlaps=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        num_seqs: int,
        chunk: int,
        window: int | None,
        num_window_groups: int,
        context_length: int,
        max_draft_tokens: int,
        copy_seconds: float,
        overlaps: bool,
    ) -> None:
        self.overlaps = overlaps
        self.aborted: set[str] = set()
        self.context_length = context_length
        self.num_groups = 1 + (num_window_groups if window else 0)
        has_groups = self.num_groups > 1
        self.harness = EngineHarness(
            num_blocks * self.num_groups if context_length == SHORT else 20 + 5 * self.num_groups,
            context_length=context_length,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            max_num_waiting=4,
            max_prefill_tokens_with_decodes=chunk,
            window=None if has_groups else window,
            num_window_groups=num_window_groups if has_groups else None,
            group_window=window if has_groups else None,
            step_seconds=lambda output: 0.001 * (1 + output.num_tokens),
            max_draft_tokens=max_draft_tokens,
            drafter=Drafting(lambda position: self.token_at(position)),
            overlaps=overlaps,
        )
        self.harness.runner.stop_positions = {17}
        self.harness.runner.copy_seconds = copy_seconds  # of a block: a load takes several steps, or none
        self.alive: dict[str, Expected] = {}
        self.points: set[bytes] = set()
        """As a worker's front has heard of them."""
        self.num_added = 0
        self.num_slots = 0

    @rule(
        target=requests,
        mode=st.sampled_from(["aggregated", "prefill", "decode"]),
        family=st.integers(0, 1),
        num_tokens=st.integers(1, SHORT) | st.integers(SHORT, LONG),
        max_tokens=st.integers(1, 12),
        num_choices=st.integers(1, 3),
        is_cached=st.booleans(),
        bounds=st.tuples(st.none() | st.integers(0, 4), st.none() | st.integers(0, 4)),
        num_ready=st.integers(0, 6),
        first_of_windows=st.integers(0, 4),
        priority=st.integers(0, 1),
    )
    def add(
        self,
        mode: Mode,
        family: int,
        num_tokens: int,
        max_tokens: int,
        num_choices: int,
        is_cached: bool,
        bounds: tuple[int | None, int | None],
        num_ready: int,
        first_of_windows: int,
        priority: int,
    ) -> object:
        self.num_added += 1
        name = f"r{self.num_added}"
        expected = Expected(mode, [family, *range(1, num_tokens)], max_tokens, num_choices if mode == "prefill" else 1)
        events = self.harness.add(
            name,
            expected.prompt,
            max_tokens=max_tokens,
            mode=mode,
            root=ROOT if is_cached else None,
            max_found_blocks=bounds[0],
            max_left_blocks=bounds[1],
            choice_seeds=range(expected.num_choices) if mode == "prefill" else (),
            priority=priority,
            fairness_key=str(family),
            prefix=[] if mode == "decode" else self.lay_ready(expected.prompt, num_ready, first_of_windows),
        )
        if not isinstance(events[0], Reserved):
            return multiple()
        self.alive[name] = expected
        return name

    @rule(name=requests, first_block=st.integers(0, 5), num_blocks=st.integers(1, 6), group=st.integers(0, 2))
    def import_slab(self, name: str, first_block: int, num_blocks: int, group: int) -> None:
        if name not in self.alive or group >= self.num_groups:
            return
        kv = kv_of(self.alive[name].prompt, group)
        slots = []
        for start in range(first_block * 4, min(len(kv), (first_block + num_blocks) * 4), 4):
            self.num_slots += 1
            self.harness.runner.remote[self.num_slots] = [*kv[start : start + 4], 0, 0, 0][:4]
            slots.append(self.num_slots)
        self.handle(slab(name, first_block, slots, group=group))

    @rule(name=requests)
    def import_all(self, name: str) -> None:
        for group in range(self.num_groups):
            self.import_slab(name, 0, 6, group)

    @rule(name=requests)
    def start_decode(self, name: str) -> None:
        if name in self.alive:
            self.handle(StartDecode(name, [self.token_at(len(self.alive[name].prompt))]))

    @rule(name=requests)
    def recompute(self, name: str) -> None:
        self.handle(Recompute(name))

    @rule(name=consumes(requests))
    def abort(self, name: str) -> None:
        """Abort a request; without overlap at once, else perhaps behind the running step, which may still answer it."""
        self.handle(AbortRequest(name))
        if self.alive.pop(name, None) is not None:
            self.aborted.add(name)

    @rule(name=requests)
    def release(self, name: str) -> None:
        self.handle(ReleaseHeld(name))

    def handle(self, command: Command) -> None:
        for event in self.harness.core.handle(command):
            self.hear(event)

    def hear(self, event: EngineEvent) -> None:
        if isinstance(event, StepDone) and event.points is not None:
            stored, evicted = keys_of(event.points.stored), keys_of(event.points.evicted)
            assert not stored & self.points and evicted <= self.points, "told twice, or of what nobody has heard"
            self.points = self.points - evicted | stored

    def lay_ready(self, tokens: list[int], num_blocks: int, first_of_windows: int) -> list[PrefixBlock]:
        prefix = []
        for group in range(self.num_groups):
            kv = kv_of(tokens, group)
            for index in range(first_of_windows if group else 0, min(num_blocks, len(kv) // 4)):
                self.num_slots += 1
                self.harness.runner.remote[self.num_slots] = kv[4 * index : 4 * index + 4]
                prefix.append(PrefixBlock(index, extent(self.num_slots, 4 << 20), group))
        return prefix

    @rule(name=requests, seconds=st.integers(1, 6))
    def let_time_pass(self, name: str, seconds: int) -> None:
        self.harness.runner.seconds += seconds

    @rule(name=requests)
    def break_one_in_the_next_step(self, name: str) -> None:
        self.harness.runner.breaks_with = RequestsFailed([name], "broken")

    @rule(is_busy=st.booleans())
    def let_steps_run(self, is_busy: bool) -> None:
        self.harness.runner.is_busy = is_busy

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.harness.core.has_work():
                self.take_step()

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if hasattr(self, "harness"):
            self.harness.pool.check()

    @invariant()
    def what_is_told_of_the_pool_is_what_the_pool_has(self) -> None:
        if hasattr(self, "harness"):
            pool = self.harness.pool
            has = {block_hash[:8] for block in pool._points if (block_hash := pool._hashes[block]) is not None}
            changed = pool._changed_points
            assert self.points - changed.keys() | {key for key, is_stored in changed.items() if is_stored} == has

    @invariant()
    def no_request_has_blocks_behind_its_window_or_more_than_it_may(self) -> None:
        if not hasattr(self, "harness") or self.num_groups == 1:
            return
        scheduler = self.harness.core.scheduler
        for request in scheduler._requests.values():
            if request.state in (RequestState.RUNNING, RequestState.HELD):
                assert request.num_dropped_blocks == scheduler._kv.groups.first_seen(request.num_computed_tokens)
            assert len(blocks_of(request)) <= most_blocks(scheduler.config, 4 * len(request.block_table))
        assert scheduler._kv.groups.num_promised <= self.harness.pool.num_spare

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.runner.is_busy = False
        for name in [f"r{number}" for number in range(1, self.num_added + 1)]:
            self.recompute(name)
            self.release(name)
        for _ in range(1000):
            if not self.harness.core.has_work():
                break
            self.take_step()
        assert self.alive == {}, "a request did not end"
        self.harness.assert_nothing_is_left()

    def take_step(self) -> None:
        events: list[EngineEvent] = []
        try:
            events = self.harness.turn() if self.overlaps else self.step_alone()
        except RequestsFailed:  # it names a request that is not in this step: an engine would end here
            self.harness.core._flight = None
            return
        for event in events:
            self.hear(event)
            if isinstance(event, RequestFailed) and event.request_id not in self.aborted:
                del self.alive[event.request_id]
            elif isinstance(event, StepDone):
                self.take_all(event)

    def step_alone(self) -> list[EngineEvent]:
        return [self.harness.step(), *self.harness.core.take_failures()]

    def take_all(self, done: StepDone) -> None:
        for output in done.outputs:
            if output.request_id not in self.aborted:
                self.take(output)
        stats = done.stats
        assert stats.num_total_blocks == stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
        assert stats.num_held_blocks <= stats.num_used_blocks

    def take(self, output: RequestOutput) -> None:
        expected = self.alive[output.request_id]
        first = len(expected.prompt)
        if expected.mode == "prefill":
            assert output.token_ids == [self.token_at(first) + 100 * output.choice_index]
        else:
            end = output.position + len(output.token_ids)
            assert output.token_ids == [self.token_at(position) for position in range(output.position, end)]
        expected.answer += output.token_ids
        expected.num_last += output.is_last
        if expected.num_last == expected.num_choices:
            self.check_end(output, expected)
            del self.alive[output.request_id]

    def check_end(self, output: RequestOutput, expected: Expected) -> None:
        first, end = len(expected.prompt), output.position + len(output.token_ids)
        if expected.mode == "prefill":
            assert output.num_computed_tokens + output.num_cached_tokens == first
            return
        full = min(first + expected.max_tokens, self.context_length + 1)
        assert end == full if output.finish_reason == "length" else self.token_at(end - 1) == STOP
        assert expected.answer == [self.token_at(position) for position in range(end - len(expected.answer), end)]
        if expected.mode == "aggregated":
            assert end - len(expected.answer) == first
            assert output.num_computed_tokens + output.num_cached_tokens == first
        else:
            assert end - len(expected.answer) in (first, first + 1)

    def token_at(self, position: int) -> int:
        return STOP if position in self.harness.runner.stop_positions else 1000 + position


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

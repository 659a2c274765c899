"""Do prompt chunks leave answers their pace, and do prompts go on all the same?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.scheduling.step_time import StepWork
from tests.tandem_engine.scheduling.harness import ROOT, World, tokens_of

BLOCK = 4


def machine(fixed: float, per_token: float, per_pair: float) -> World:
    """A world on a simulated machine, 10 ms its ITL target."""

    def seconds(work: StepWork) -> float:
        num_tokens = work.num_decodes + work.num_prompt_tokens
        return fixed + per_token * num_tokens + per_pair * (work.num_prompt_pairs + work.num_decode_keys)

    return World(
        num_blocks=1024,
        context_length=1024,
        max_num_batched_tokens=256,
        max_num_waiting=64,
        itl_target_ms=10,
        step_seconds=seconds,
    )


def learn(world: World) -> None:
    """Run some requests by which the machine is known: answers, and prompts that nothing is beside."""
    for length in (3, 16, 64, 200, 250):
        world.add(f"w{length}", list(range(length)), max_tokens=3)
        world.run()


def chunks_beside_answers(world: World) -> list[tuple[float, int]]:
    """Run to the end; return seconds and prompt tokens of each step that had both answers and a prompt's chunk."""
    steps = []
    while world.core.has_work():
        before = world.runner.seconds
        world.core.step()
        runs = world.last_runs()
        num_prompt_tokens = sum(number for _, first, number in runs if number > 1 or first == 0)
        if 0 < num_prompt_tokens < sum(number for _, _, number in runs):
            steps.append((world.runner.seconds - before, num_prompt_tokens))
    return steps


def test_a_prompt_is_cut_to_the_blocks_that_fit_beside_the_answers() -> None:
    # A step takes 2 ms and 0.1 ms per token: 78 tokens beside two answers, less what predictions are off.
    world = machine(0.002, 0.0001, 0)
    learn(world)
    for name in "ab":
        world.add(name, [1, 2, 3], max_tokens=60)
    world.step()
    world.add("p", list(range(400)), max_tokens=1)
    chunks = chunks_beside_answers(world)
    assert all(seconds <= 0.010 for seconds, _ in chunks)
    assert all(60 < num_tokens <= 78 and num_tokens % BLOCK == 0 for _, num_tokens in chunks[:-1])
    world.assert_nothing_is_left()


def test_where_nothing_answers_a_prompt_is_not_cut() -> None:
    world = machine(0.002, 0.001, 0)
    world.add("p", list(range(250)), max_tokens=1)
    world.add("q", list(range(50)), max_tokens=1)
    world.step()
    assert world.last_runs() == [("p", 0, 250), ("q", 0, 6)]
    world.run()
    world.assert_nothing_is_left()


def test_a_prompt_goes_on_by_one_block_per_step_however_slow_answers_are() -> None:
    world = machine(0.050, 0.001, 0)
    world.add("a", [1, 2, 3], max_tokens=20)
    world.step()
    world.add("p", list(range(10)), max_tokens=1)
    world.add("q", list(range(9)), max_tokens=1)
    for _ in range(5):
        world.step()
    chunks = [[run for run in step if run[0] != "a"] for step in world.runner.steps[1:]]
    assert chunks == [[("p", 0, 4)], [("p", 4, 4)], [("p", 8, 2)], [("q", 0, 4)], [("q", 4, 4)]]
    world.run()
    world.assert_nothing_is_left()


def test_without_a_target_the_whole_budget_is_used() -> None:
    world = World(num_blocks=64, context_length=256, max_num_batched_tokens=64, step_seconds=lambda work: 1.0)
    world.add("a", [1, 2, 3], max_tokens=20)
    world.step()
    world.add("p", list(range(100)), max_tokens=1)
    world.step()
    assert world.last_runs() == [("a", 3, 1), ("p", 0, 63)]
    world.run()
    world.assert_nothing_is_left()


def test_answers_wait_for_copies_too() -> None:
    world = machine(0.001, 0.0001, 0)
    world.runner.copy_seconds = 0.004
    learn(world)
    world.add("a", [1, 2, 3], max_tokens=60)
    world.step()
    world.runner.remote = {40: [None] * 4}
    world.add("p", list(range(400)), max_tokens=1, root=ROOT, prefix={0: 40})
    before = world.runner.seconds
    world.step()
    assert world.runner.imported and 0.007 < world.runner.seconds - before <= 0.010
    world.run()
    # They are not mistaken for what prompts cost.
    for number in range(30):
        world.add(f"q{number}", [number, *range(15)], max_tokens=1, root=ROOT, prefix={0: 40})
        world.run()
    assert world.core.scheduler.pacer.model.prompt_seconds(0, 12) == pytest.approx(0.0012, rel=0.1)
    world.assert_nothing_is_left()


@settings(max_examples=60, deadline=None)
@given(
    fixed=st.floats(0.0005, 0.006),
    per_token=st.floats(0.00002, 0.0005),
    per_pair=st.sampled_from([0.0, 1e-7, 1e-6]),
    prompts=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    num_answers=st.integers(1, 6),
)
def test_steps_keep_the_target_on_any_machine_and_every_prompt_ends(
    fixed: float, per_token: float, per_pair: float, prompts: list[int], num_answers: int
) -> None:
    world = machine(fixed, per_token, per_pair)
    learn(world)
    # 1. Prompts that come while others answer.
    for number in range(num_answers):
        world.add(f"a{number}", [number, 2, 3], max_tokens=100)
    world.step()
    for number, length in enumerate(prompts):
        world.add(f"p{number}", list(range(length)), max_tokens=2)
    start = len(world.runner.steps)
    for seconds, num_prompt_tokens in chunks_beside_answers(world):
        assert seconds <= 0.010 * 1.1 or num_prompt_tokens <= BLOCK
    # 2. All ended, and none stood still while it could go on.
    computed = sum(number for step in world.runner.steps[start:] for name, _, number in step if name[0] == "p")
    assert computed == sum(prompts) + len(prompts)
    world.assert_nothing_is_left()


@settings(max_examples=30, deadline=None)
@given(target=st.sampled_from([0.0, 1.0, 5.0, 20.0]), seed=st.integers(0, 100))
def test_the_target_changes_no_token(target: float, seed: int) -> None:
    world = World(
        128, context_length=256, itl_target_ms=target, step_seconds=lambda work: 1e-4 * work.num_prompt_tokens
    )
    for number in range(6):
        world.add(str(number), [seed, *range(7 * number)], max_tokens=8)
    outputs = world.run()
    for number in range(6):
        length = 7 * number + 1
        assert tokens_of(outputs, str(number)) == [1000 + position for position in range(length, length + 8)]
    world.assert_nothing_is_left()

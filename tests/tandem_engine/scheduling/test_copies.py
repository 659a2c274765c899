"""Tests that imports and loads of many blocks take a bounded time from each step."""

from __future__ import annotations

from tandem_engine.messages import EngineEvent, ImportSlab, PrefixBlock, RequestOutput, SlabImported, StartDecode
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness, extent, kv_of, tokens_of

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 99
PROMPT = list(range(4 * NUM_BLOCKS + 2))
MOST_SECONDS = 0.020


def _harness() -> EngineHarness:
    """Return a harness with every block of the prompt in a remote slot; a block of 1 MiB is copied in 1 ms."""
    harness = EngineHarness(300, context_length=1000, max_num_batched_tokens=512, step_seconds=lambda output: 0.001)
    kv = kv_of(PROMPT)
    harness.runner.remote = {1000 + block: kv[4 * block : 4 * block + 4] for block in range(NUM_BLOCKS)}
    harness.runner.copy_seconds = 0.001
    harness.add("answer", [7, 8, 9], max_tokens=200)
    harness.step()
    return harness


def _load(harness: EngineHarness, name: str = "long", max_tokens: int = 2) -> None:
    prefix = [PrefixBlock(index, extent(1000 + index, BLOCK_BYTES)) for index in range(NUM_BLOCKS)]
    harness.add(name, PROMPT, root=ROOT, prefix=prefix, max_tokens=max_tokens)


def test_a_long_prefix_is_loaded_over_many_steps_and_an_answer_goes_on_meanwhile() -> None:
    harness = _harness()
    _load(harness)
    outputs: list[RequestOutput] = []
    num_steps = 0
    while not tokens_of(outputs, "long"):
        before = harness.runner.seconds
        outputs += harness.step().outputs
        assert harness.runner.seconds - before <= MOST_SECONDS
        num_steps += 1
        assert len(tokens_of(outputs, "answer")) == num_steps
    assert num_steps >= 5
    assert harness.counter("prompt_tokens_loaded") == 4 * NUM_BLOCKS
    assert harness.counter("prompt_tokens_computed") == 3 + 2
    assert 0.009 < harness.counter("longest_copy_seconds") <= MOST_SECONDS
    harness.run()
    harness.assert_nothing_is_left()


def test_who_comes_while_a_prefix_is_loaded_finds_it_and_loads_nothing() -> None:
    harness = _harness()
    _load(harness)
    _load(harness, "too")
    harness.run()
    assert len(harness.runner.imported) == NUM_BLOCKS
    assert harness.counter("prompt_tokens_cached") == 2 * 4 * NUM_BLOCKS
    harness.assert_nothing_is_left()


def test_a_request_that_leaves_while_its_prefix_is_loaded_returns_its_lease_and_no_block_is_written_after_that() -> (
    None
):
    harness = _harness()
    _load(harness)
    harness.step()
    num_copied = len(harness.runner.imported)
    assert 0 < num_copied < NUM_BLOCKS
    harness.core.scheduler.abort("long")
    assert harness.step().admitted == ["long"]
    harness.run()
    assert len(harness.runner.imported) == num_copied
    harness.assert_nothing_is_left()


def test_a_prefix_that_is_gone_half_way_is_computed() -> None:
    harness = _harness()
    harness.runner.stale_slots = {1000 + 60}
    _load(harness)
    outputs = harness.run()
    assert tokens_of(outputs, "long") == [1000 + len(PROMPT), 1001 + len(PROMPT)]
    assert harness.counter("prompt_tokens_loaded") == 0
    harness.assert_nothing_is_left()


def test_a_large_slab_is_copied_over_many_steps_before_any_later_command() -> None:
    harness = _harness()
    harness.add("long", PROMPT[: 4 * NUM_BLOCKS], mode="decode", max_tokens=2)
    command = ImportSlab("long", 0, 0, [extent(1000 + index, BLOCK_BYTES) for index in range(NUM_BLOCKS)])
    events: list[EngineEvent] | None = None
    outputs: list[RequestOutput] = []
    num_steps = 0
    while events is None:
        before = harness.runner.seconds
        events = harness.core.handle_some(command)
        outputs += harness.step().outputs
        assert harness.runner.seconds - before <= MOST_SECONDS
        num_steps += 1
    assert events == [SlabImported("long", 0, NUM_BLOCKS * BLOCK_BYTES)]
    assert num_steps >= 5
    assert len(tokens_of(outputs, "answer")) == num_steps
    harness.core.handle(StartDecode("long", [1000 + 4 * NUM_BLOCKS]))
    assert tokens_of(harness.run(), "long") == [1001 + 4 * NUM_BLOCKS]
    assert harness.counter("reprefill_tokens") == 0
    assert harness.counter("blocks_imported") == NUM_BLOCKS
    harness.assert_nothing_is_left()


def test_after_a_prompt_that_took_long_to_arrive_its_slab_waits_for_the_next_step() -> None:
    harness = _harness()
    harness.runner.prepare_seconds = {"long": 0.012}
    harness.add("long", PROMPT[: 4 * NUM_BLOCKS], mode="decode", max_tokens=2)
    command = ImportSlab("long", 0, 0, [extent(1000 + index, BLOCK_BYTES) for index in range(NUM_BLOCKS)])
    assert harness.core.handle_some(command) is None
    assert not harness.runner.imported
    harness.step()
    assert harness.core.handle_some(command) is None
    assert harness.runner.imported
    assert 0.011 < harness.counter("longest_commands_seconds") <= MOST_SECONDS


def test_the_longest_step_is_that_of_steps_with_answers() -> None:
    harness = _harness()
    harness.runner.step_seconds = lambda output: 0.001 * output.num_tokens
    harness.add("beside", PROMPT[:100], max_tokens=1)
    harness.step()
    assert harness.last_runs() == [("answer", 3, 1), ("beside", 0, 64)]
    harness.core.scheduler.abort("answer")
    harness.add("alone", PROMPT[100:300], max_tokens=1)
    harness.run()
    assert 0.064 < harness.counter("longest_answer_step_seconds") <= 0.065 + 1e-6
    assert harness.counter("step_seconds") > 0.3


def test_loads_go_on_while_imports_take_all_their_time() -> None:
    harness = _harness()
    _load(harness, max_tokens=1)
    for number in range(40):
        name = f"d{number}"
        harness.add(name, PROMPT[:40], mode="decode", max_tokens=1)
        slots = [extent(1000 + index, BLOCK_BYTES) for index in range(10)]
        harness.core.handle_some(ImportSlab(name, 0, 0, slots))
        before = harness.runner.seconds
        harness.step()
        assert harness.runner.seconds - before <= MOST_SECONDS
        harness.core.scheduler.abort(name)
    assert harness.counter("prompt_tokens_loaded") == 4 * NUM_BLOCKS

"""Tests that layers with a window use no more blocks than they need, and that prefills get the promised ones."""

from __future__ import annotations

import random
from array import array

from tandem_engine.execution.kv_groups import choose_groups
from tandem_engine.messages import AddRequest, ReleaseHeld, Reserved
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.scheduler import Scheduler
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tests.tandem_engine.scheduling.harness import ROOT, EngineHarness

GEMMA_3_27B = [None if layer % 6 == 5 else 1024 for layer in range(62)]
BLOCK = 16


def test_prefills_that_share_windows_with_others_never_lack_a_block() -> None:
    most_promised = 0
    for seed in range(12):
        rng = random.Random(seed)
        harness = EngineHarness(
            num_blocks=90,
            context_length=160,
            max_num_seqs=12,
            max_num_waiting=40,
            num_window_groups=2,
            group_window=rng.randint(1, 14),
            max_num_batched_tokens=rng.randint(1, 12),
        )
        held: list[str] = []
        for number in range(60):
            length, cut = rng.randint(1, 80), rng.choice([0, 20, 60])
            prompt = [*range(min(cut, length)), *(rng.randrange(5000) for _ in range(length - cut))]
            mode = "prefill" if rng.random() < 0.7 else "aggregated"
            harness.add(str(number), prompt, max_tokens=rng.randint(1, 20), mode=mode, root=ROOT)  # type: ignore[arg-type]
            for _ in range(rng.randint(0, 8)):
                most_promised = max(most_promised, harness.core.scheduler._kv.groups.num_promised)
                if harness.core.has_work():
                    held += [output.request_id for output in harness.step().outputs if output.is_last]
            while len(held) > 3:
                harness.core.handle(ReleaseHeld(held.pop(rng.randrange(len(held)))))
        while harness.core.has_work() or held:
            while held:
                harness.core.handle(ReleaseHeld(held.pop()))
            held = [output.request_id for output in harness.step().outputs if output.is_last]
        harness.assert_nothing_is_left()
    assert most_promised > 0, "no prefill had to wait for a block of its own"


def num_held(num_tokens: int, num_bytes: int, *, in_groups: bool) -> int:
    """Count the answers of a given context for which a pool of Gemma 3 27B has room."""
    groups = choose_groups(GEMMA_3_27B) if in_groups else ()
    num_layers = len(groups[0].layers) if groups else len(GEMMA_3_27B)
    bytes_per_block = num_layers * 2 * 16 * 128 * BLOCK * 4  # keys and values, 16 heads of 128 numbers in float32
    config = SchedulerConfig(
        num_blocks=num_bytes // bytes_per_block,
        block_size=BLOCK,
        context_length=131_072,
        vocab_size=200_000,
        max_num_seqs=1000,
        max_num_waiting=1000,
        num_window_groups=len(groups) - 1 if groups else None,
        group_window=groups[1].window if groups else None,
    )
    scheduler = Scheduler(config, array("Q", bytes(8 * config.num_blocks)))
    prompt, sampling = list(range(num_tokens)), SamplingParams(max_tokens=100)
    num = 0
    while isinstance(scheduler.add(AddRequest(str(num), prompt, num_tokens, sampling, mode="decode")), Reserved):
        num += 1
    scheduler.pool.check()
    return num


def test_a_pool_holds_five_times_as_many_long_contexts_of_gemma_3_as_without_groups() -> None:
    num_bytes = 8 * 32_768 * len(GEMMA_3_27B) * 2 * 16 * 128 * 4 + (1 << 30)  # of eight contexts of 32,768 tokens
    figures = {
        num_tokens: tuple(num_held(num_tokens, num_bytes, in_groups=in_groups) for in_groups in (False, True))
        for num_tokens in (1_024, 4_096, 32_768)
    }
    # Within the window they cost a little: the blocks of 62 layers in seven groups of ten have room for 70.
    assert figures == {1_024: (249, 220), 4_096: (63, 155), 32_768: (8, 41)}

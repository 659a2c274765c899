"""One model on two kinds of machine, through the gateway, under "class": each worker shares blocks with its own class.

What they share under "layout" is in test_mixed_layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tandem_runtime.kv.spaces import space_of
from tests.system.fleet import Fleet
from tests.system.mixed_hardware import NUM_TOKENS, answered, card, decode_ledger, lost_half_way
from tests.system.reference import clear_prompt, greedy

SMALL = ("--num-threads", "1", "--num-kv-blocks", "128", "--dtype", "float32", "--exactness", "class")
CPP = (*SMALL, "--kernels", "cpp", "--block-size", "16")
TORCH = (*SMALL, "--kernels", "torch", "--block-size", "32")


async def test_under_class_each_worker_stays_with_its_own(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder, seen = checkpoint("demo"), dict[str, set[str]]()
    async with Fleet(tmp_path, local_prefill="auto") as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-cpp", *CPP)
        fleet.start("decode", "decode-cpp", *CPP)
        fleet.start("decode", "decode-torch", *TORCH)
        await fleet.ready()
        assert space_of(card(fleet, "prefill-cpp")) == space_of(card(fleet, "decode-cpp"))
        assert space_of(card(fleet, "prefill-cpp")) != space_of(card(fleet, "decode-torch"))
        prompt = clear_prompt(folder, 64, NUM_TOKENS)
        for number in range(200):
            stream, tokens = await answered(fleet, prompt, salt=str(number).encode())
            assert tokens == greedy(folder, prompt, NUM_TOKENS)
            assert not stream.state.history.seams
            calls = {call.is_prefill: call.worker_id for call in stream.state.history.calls}
            seen.setdefault(calls[False], set()).add(calls.get(True, ""))
            assert decode_ledger(stream).num_computed_tokens == (0 if True in calls else 64)
            if number >= 20 and len(seen) == 2:
                break
        assert seen["decode-torch"] == {""} and seen["decode-cpp"] <= {"prefill-cpp", ""}
        await fleet.pools_are_full()
        await lost_half_way(fleet, folder)

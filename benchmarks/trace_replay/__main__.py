"""Measures which share of a trace's prompt tokens the real system finds cached, beside an offline LRU.

python -m benchmarks.trace_replay --trace FILE [--quick] [--requests N] [--share S] [--json FILE] [--markdown FILE]

FILE is a Mooncake trace; mooncake.py scales it. The capacity counts all memory that can hold a block: the store and
both workers' pools. The offline cache has as many blocks, gets one prompt after the other, and stores no answers. At
the end, cached_prompt.py measures the time to first token of a cached long prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.eviction.__main__ import Trace, optimum, replay, trace_of
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.trace_replay import cached_prompt
from benchmarks.trace_replay.mooncake import BLOCK_TOKENS, SCALE, TraceRequest, read_requests
from benchmarks.trace_replay.replaying import CONCURRENCY, POOL_BLOCKS, Capacity, Played, play

MIN_OF_LRU = 0.9
_SHARE = 0.1
_QUICK_SHARE = 0.7
"""Much, for the first requests of a trace have few blocks in common, and the pools alone have hundreds."""
_QUICK_REQUESTS = 300
_ROUNDS = 5
_QUICK_ROUNDS = 3
_WHERE = (
    "give the trace with --trace FILE: mooncake_conversation.jsonl, of the traces that github.com/kvcache-ai/Mooncake "
    "publishes beside its paper (FAST '25); it is not part of this repository"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, measure, print, save; return the exit code."""
    options = _options(arguments)
    lines = options.trace.read_text().splitlines()
    requests = read_requests(lines[: options.requests])
    trace = trace_of(((each.num_prompt_tokens, each.hash_ids) for each in requests), BLOCK_TOKENS)
    capacity = Capacity(round(options.share * trace.working_set))
    conditions = {
        "trace": f"{options.trace.name}, the first {len(requests)} of {len(lines)} requests, lengths / {SCALE}: "
        f"{trace.num_tokens} prompt tokens, {trace.working_set} different blocks of {BLOCK_TOKENS}",
        "capacity": f"{capacity.total_blocks} blocks, {options.share:.0%} of the different ones: "
        f"{capacity.store_blocks} in the store, {POOL_BLOCKS} in each of two pools",
        "requests": f"token ids to /v1/completions, in the trace's order, {CONCURRENCY} at a time, closed loop; a tiny "
        "random Llama; one prefill and one decode worker, --local-prefill never",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        progress(f"playing {len(requests)} requests")
        started = time.monotonic()
        played = await play(requests, capacity, made(folder, "tiny"), folder / "replay")
        seconds = time.monotonic() - started
        add(outcome, trace, requests, capacity, played)
        outcome.figures["replay.seconds"] = seconds
        progress(f"played in {seconds:.0f} s; now a long prompt, cached and not")
        shape, rounds = ("tiny", _QUICK_ROUNDS) if options.quick else (cached_prompt.TARGET_SHAPE, _ROUNDS)
        answers = await cached_prompt.ask_in_turn(made(folder, shape), rounds, folder / "cached")
        cached_prompt.add(outcome, answers, shape)

    return run("trace_replay", options, conditions, measure)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    quick = f"the first {_QUICK_REQUESTS} requests, and a tiny shape for the long prompt: does it still work?"
    arguments_of = parser("trace_replay", __doc__, quick)
    arguments_of.add_argument("--trace", type=Path, metavar="FILE", help="a Mooncake trace, JSON lines")
    arguments_of.add_argument("--requests", type=int, metavar="N", help="play the first N requests; all if not given")
    arguments_of.add_argument("--share", type=float, metavar="S", help=f"capacity / different blocks; {_SHARE}")
    options = arguments_of.parse_args(arguments)
    if options.trace is None:
        arguments_of.error(_WHERE)
    if not options.trace.exists():
        arguments_of.error(f"{options.trace} is not there; {_WHERE}")
    options.requests = options.requests or (_QUICK_REQUESTS if options.quick else None)
    options.share = options.share or (_QUICK_SHARE if options.quick else _SHARE)
    return options


# -------------------------------------------------------------------------------------------------- pure from here on


def add(outcome: Outcome, trace: Trace, requests: Sequence[TraceRequest], capacity: Capacity, played: Played) -> None:
    """Enter the replay's table, figures and target."""
    rates = {name: tokens / trace.num_tokens for name, tokens in cached_tokens(trace, capacity, played).items()}
    ratio = rates["real"] / rates["lru"] if rates["lru"] else 1.0
    outcome.figures |= {f"replay.token_hit_rate.{name}": rate for name, rate in rates.items()}
    outcome.figures |= {
        "replay.ratio.real_to_lru": ratio,
        "replay.num_requests": len(requests),
        "replay.num_prompt_tokens": trace.num_tokens,
        "replay.capacity_blocks": capacity.total_blocks,
        "replay.store_blocks": capacity.store_blocks,
        "replay.working_set_blocks": trace.working_set,
        "replay.blocks_in_store": played.num_stored_blocks,
        "replay.blocks_not_published": played.counters["prompt_cache_blocks_not_published"],
        "replay.lookups_without_answer": played.counters["prompt_cache_failures"],
    }
    names = {
        "real": "the real system",
        "lru": "offline LRU, as many blocks",
        "store_lru": "offline LRU, the store's blocks",
        "optimum": "the best possible, as many blocks",
        "infinite": "infinite cache",
    }
    rows: Rows = [(title, f"{rates[name]:.2%}", f"{rates['real'] / rates[name]:.3f}") for name, title in names.items()]
    outcome.sheets.append(Sheet("token hit rate", ("cache", "hit rate", "real / this"), rows))
    text = f"token hit rate = {ratio:.3f} of an offline LRU of equal capacity, at least {MIN_OF_LRU}"
    outcome.targets.append(Target(text, ratio >= MIN_OF_LRU))


def cached_tokens(trace: Trace, capacity: Capacity, played: Played) -> dict[str, int]:
    """Return how many tokens were cached in the real system, and would be in those it is compared with."""
    return {
        "real": sum(played.cached_tokens),
        "lru": replay(trace, capacity.total_blocks),
        "store_lru": replay(trace, capacity.store_blocks),
        "optimum": optimum(trace, capacity.total_blocks),
        "infinite": optimum(trace, trace.working_set),
    }


if __name__ == "__main__":
    sys.exit(main())

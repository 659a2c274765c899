"""Measures the share of a trace's prompt tokens that a cache would hold, by size of the cache.

python -m benchmarks.eviction --trace FILE [--quick] [--json FILE]

FILE is a Mooncake trace: a JSON object per line, with `input_length` and `hash_ids` of the prompt's blocks. Compares
the KV service's eviction order (LRU) with an infinite cache and with the optimum, which knows the future (Belady).
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.stats import Figures
from kv_transfer_svc.blocks.block import BlockKey
from kv_transfer_svc.blocks.leaf_heap import LeafHeap

_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_QUICK_FRACTIONS = (0.05, 0.2)
_QUICK_REQUESTS = 2000


@dataclass(frozen=True)
class Prompt:
    """The full blocks of one request; only full blocks can be cached."""

    num_tokens: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True)
class Trace:
    prompts: Sequence[Prompt]
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def working_set(self) -> int:
        """Number of different blocks."""
        return len({key for prompt in self.prompts for key in prompt.keys})

    def cached_tokens(self, prompt: Prompt, num_blocks: int) -> int:
        """Return the tokens that `num_blocks` cached leading blocks save; one token is always computed."""
        return min(num_blocks * self.block_tokens, prompt.num_tokens - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print, save; return the exit code."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    trace = read_trace(
        options.trace.read_text().splitlines()[: _QUICK_REQUESTS if options.quick else None], options.block_tokens
    )
    fractions = _QUICK_FRACTIONS if options.quick else _FRACTIONS
    figures = hit_rates(trace, fractions)
    conditions = {
        "trace": f"{options.trace.name}, {len(trace.prompts)} requests, {trace.num_tokens} prompt tokens",
        "blocks": f"of {trace.block_tokens} tokens, {trace.working_set} different ones, of equal size",
        "order": "each prompt is looked up and then stored, one after the other; answers are not stored",
        "seconds": round(time.monotonic() - started, 1),
        "python": platform.python_version(),
        "command": " ".join(["python -m benchmarks.eviction", *sys.argv[1:]]),
    }
    _print(conditions, figures, fractions)
    if options.json:
        options.json.write_text(json.dumps({"conditions": conditions, "figures": figures}, indent=2) + "\n")
    return 0


def read_trace(lines: Iterable[str], block_tokens: int) -> Trace:
    """Read a Mooncake trace; a last block that is not full is left out."""
    requests = map(json.loads, lines)
    return trace_of(((request["input_length"], request["hash_ids"]) for request in requests), block_tokens)


def trace_of(prompts: Iterable[tuple[int, Sequence[int]]], block_tokens: int) -> Trace:
    """Return a trace of prompts, each a number of tokens and the hash ids of its blocks."""
    keys: dict[int, BlockKey] = {}
    for_replay = []
    for num_tokens, hash_ids in prompts:
        full = hash_ids[: num_tokens // block_tokens]
        for hash_id in full:
            keys.setdefault(hash_id, BlockKey(bytes(16), 0, hash_id.to_bytes(16, "little")))
        for_replay.append(Prompt(num_tokens, tuple(keys[hash_id] for hash_id in full)))
    return Trace(for_replay, block_tokens)


def hit_rates(trace: Trace, fractions: Sequence[float]) -> Figures:
    """Return flat figures: `infinite`, and `lru` and `optimum` for each fraction of the working set."""
    working_set, num_tokens = trace.working_set, trace.num_tokens
    figures: Figures = {"working_set_blocks": working_set, "token_hit_rate.infinite": optimum(trace, working_set)}
    for fraction in fractions:
        capacity = max(1, round(fraction * working_set))
        cached = {"lru": replay(trace, capacity), "optimum": optimum(trace, capacity)}
        figures[f"capacity_blocks.{fraction}"] = capacity
        figures |= {f"token_hit_rate.{fraction}.{name}": tokens / num_tokens for name, tokens in cached.items()}
    figures["token_hit_rate.infinite"] /= num_tokens
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def replay(trace: Trace, capacity: int) -> int:
    """Return how many tokens are cached with `capacity` blocks, evicted as the KV service evicts."""
    heap, present, cached_tokens = LeafHeap(), set[BlockKey](), 0
    for prompt in trace.prompts:
        run = next((index for index, key in enumerate(prompt.keys) if key not in present), len(prompt.keys))
        cached_tokens += trace.cached_tokens(prompt, run)
        heap.use(prompt.keys[:run])
        needed = set(prompt.keys)
        for index in range(run, len(prompt.keys)):
            if len(present) >= capacity:
                victim = heap.victim(needed.__contains__)
                if victim is None:  # the prompt is longer than the cache
                    break
                heap.remove(victim)
                present.discard(victim)
            key, parent = prompt.keys[index], prompt.keys[index - 1] if index else None
            present.add(key)
            heap.add(key, parent)
    return cached_tokens


def optimum(trace: Trace, capacity: int) -> int:
    """Return how many tokens are cached at best: the block needed last is evicted, or never stored.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. A block is
    needed no later than its successors, so of two equal blocks the later one is evicted.
    """
    uses = _uses(trace)
    next_uses: dict[BlockKey, float] = {}
    heap: list[tuple[float, int, int, BlockKey]] = []
    cached_tokens = 0
    for number, prompt in enumerate(trace.prompts):
        run = next((index for index, key in enumerate(prompt.keys) if key not in next_uses), len(prompt.keys))
        cached_tokens += trace.cached_tokens(prompt, run)
        for index, key in enumerate(prompt.keys):
            uses[key].popleft()
            next_uses[key] = uses[key][0] if uses[key] else float("inf")
            heapq.heappush(heap, (-next_uses[key], -index, number, key))
        while len(next_uses) > capacity:
            negative, _, _, key = heapq.heappop(heap)
            if next_uses.get(key) == -negative:
                del next_uses[key]
    return cached_tokens


def _uses(trace: Trace) -> dict[BlockKey, deque[int]]:
    """Return, for each block, the numbers of the prompts that contain the block."""
    uses: dict[BlockKey, deque[int]] = {}
    for number, prompt in enumerate(trace.prompts):
        for key in prompt.keys:
            uses.setdefault(key, deque()).append(number)
    return uses


def _print(conditions: Mapping[str, Any], figures: Figures, fractions: Sequence[float]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=150)
    for name, value in conditions.items():
        console.print(f"{name:<8} {value}", highlight=False, markup=False)
    columns = ["lru", "optimum"]
    table = Table("cache / working set", "blocks", *columns, "lru / optimum", title="token hit rate")
    for column in table.columns:
        column.justify = "right"
    for fraction in fractions:
        rates = {name: figures[f"token_hit_rate.{fraction}.{name}"] for name in columns}
        share = f"{rates['lru'] / rates['optimum']:.0%}" if rates["optimum"] else "-"
        blocks = f"{figures[f'capacity_blocks.{fraction}']:.0f}"
        table.add_row(f"{fraction:.0%}", blocks, *(f"{rate:.2%}" for rate in rates.values()), share)
    console.print(table)
    console.print(f"infinite cache: {figures['token_hit_rate.infinite']:.2%}", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, metavar="FILE", required=True, help="a Mooncake trace, JSON lines")
    parser.add_argument("--block-tokens", type=int, default=512, metavar="N", help="tokens of a block of the trace")
    parser.add_argument(
        "--quick", action="store_true", help=f"the first {_QUICK_REQUESTS} requests, two sizes: seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and flat figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())

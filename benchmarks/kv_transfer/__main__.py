"""Measures the speed of KV transfers by each transport, beside a memcpy and a bare socket loop.

python -m benchmarks.kv_transfer [--quick] [--json FILE]

    memcpy          one copy between two private buffers
    bare_socket     sendall in one process, recv_into in another
    tcp_link        one read of a service's TCP transport, checksums made and verified: what compares with bare_socket
    tcp, grpc       the whole way: seal at one host's service until a reader on another host can read all of it
    shm             pool in shared memory: last byte written until the engine's code has copied all of it to its pool
    shm_copied_in   the same where the writer first copies its bytes in
    shm_checked     the same with checksums made by the writer and verified by the reader
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kv_transfer.hosts import BLOCK_BYTES
from benchmarks.kv_transfer.transfers import Transfer, transfers
from benchmarks.lib.machine import CpuUse, machine_conditions
from benchmarks.lib.report import MAX_FOREIGN_CPU_SHARE, print_conditions
from benchmarks.lib.stats import Figures, flat, percentile

MB = 1 << 20
_ROUNDS = {1 * MB: 60, 16 * MB: 25, 256 * MB: 11}
_QUICK_ROUNDS = {1 * MB: 6, 16 * MB: 3}


@dataclass
class Measured:
    """One subject at one size."""

    num_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def figures(self) -> Figures:
        median = percentile(self.seconds, 50)
        return {
            "ms.p50": 1000 * median,
            "ms.min": 1000 * min(self.seconds),
            "ms.p99": 1000 * percentile(self.seconds, 99),
            "gb_per_second": self.num_bytes / median / 1e9,
            "cpu_seconds_per_gb": self.cpu_seconds / (len(self.seconds) * self.num_bytes / 1e9),
        }


Results = dict[int, dict[str, Measured]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 and 16 MB, a few rounds: does it still work?")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the writer and the reader; all cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and flat figures there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    conditions = machine_conditions() | {
        "client": "writer and reader (the engine's own code) in one process, on the same cores as the services",
        "threads": f"{options.threads} of writer and reader; memcpy and bare_socket have one",
        "requests": f"one slab of {BLOCK_BYTES >> 10} KiB blocks, sealed without checksums but for shm_checked",
        "command": " ".join(["python -m benchmarks.kv_transfer", *sys.argv[1:]]),
    }
    print_conditions(console, conditions)
    before = CpuUse.now()
    results = asyncio.run(_measure(_QUICK_ROUNDS if options.quick else _ROUNDS))
    foreign_share = CpuUse.now().foreign_share_since(before)
    conditions["cpu_used_by_others"] = f"{foreign_share:.1%}"
    _print(console, results, foreign_share)
    if options.json:
        figures = document_figures(results) | {"foreign_cpu_share": float(f"{foreign_share:.6g}")}
        options.json.write_text(json.dumps({"conditions": conditions, "figures": figures}, indent=2) + "\n")
    return 0


def document_figures(results: Results) -> Figures:
    """Return flat `mb16.tcp.gb_per_second: number` pairs, ratios included."""
    figures: Figures = {}
    for num_bytes, by_subject in results.items():
        prefix = f"mb{num_bytes // MB}"
        for name, measured in by_subject.items():
            figures |= flat(f"{prefix}.{name}", measured.figures)
        figures |= flat(prefix, ratios(by_subject))
    return figures


def ratios(by_subject: Mapping[str, Measured]) -> Figures:
    """Return what one would quote, of medians: how many memcpys long shm takes, and tcp's share of the bare loop."""
    median = {name: percentile(measured.seconds, 50) for name, measured in by_subject.items()}
    shown: Figures = {}
    for name in median:
        if name.startswith("shm"):
            shown[f"ratio.{name}_to_memcpy"] = median[name] / median["memcpy"]
            shown[f"ratio.{name}_less_1ms_to_memcpy"] = (median[name] - 0.001) / median["memcpy"]
    for name in ("tcp_link", "tcp", "grpc"):
        shown[f"ratio.{name}_to_bare_socket"] = median["bare_socket"] / median[name]
    return shown


# ------------------------------------------------------------------------------------------------------- measuring


async def _measure(rounds: Mapping[int, int]) -> Results:
    async with transfers(max(rounds)) as subjects:
        return {num_bytes: await _alternate(subjects, num_bytes, count) for num_bytes, count in rounds.items()}


async def _alternate(subjects: Mapping[str, Transfer], num_bytes: int, num_rounds: int) -> dict[str, Measured]:
    """Give each subject its turn in each round; the first round warms up and is not counted."""
    results = {name: Measured(num_bytes) for name in subjects}
    for number in range(num_rounds + 1):
        for name, transfer in subjects.items():
            took = await transfer(num_bytes)
            if number:
                results[name].seconds.append(took.seconds)
                results[name].cpu_seconds += took.cpu_seconds
    return results


# -------------------------------------------------------------------------------------------------------- printing


def _print(console: Console, results: Results, foreign_share: float) -> None:
    for num_bytes, by_subject in results.items():
        table = Table(f"{num_bytes // MB} MB", "ms p50", "ms min", "ms p99", "GB/s", "CPU s/GB")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, measured in by_subject.items():
            table.add_row(name, *(f"{value:.2f}" for value in measured.figures.values()))
        console.print(table)
        shown = "; ".join(f"{name.removeprefix('ratio.')} = {value:.2f}" for name, value in ratios(by_subject).items())
        console.print(f"ratios of medians: {shown}", highlight=False)
    disturbed = " (DISTURBED: not to be quoted)" if foreign_share > MAX_FOREIGN_CPU_SHARE else ""
    console.print(f"{foreign_share:.0%} of the CPU used by others{disturbed}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())

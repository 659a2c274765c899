"""Measures the kernels of platform wheels against those that are compiled for this CPU (-march=native).

python -m benchmarks.prebuilt_kernels [--rounds 300] [--threads 2]

A decode's linear layers and attention, shape S (12 layers, hidden size 768, bf16 weights), contexts of 512 tokens. All
libraries are in one process and take turns, each round in another order. A ratio below 1: the wheel is slower.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time

import torch

from infra.wheels.libraries import library_for
from tandem_engine.ops.base import HostBatch, KVPool, Weight
from tandem_engine.ops.cpu import CpuOps, load_cpu_ops
from tandem_engine.ops.cpu.compile import NATIVE
from tandem_engine.ops.cpu.library import load_file, load_library
from tandem_engine.ops.cpu.prebuilt import cpu_features, levels_of

_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _DIM = 12, 768, 2048, 12, 4, 64
_CONTEXT, _BLOCK = 512, 16
_NATIVE = "native"
_RESAMPLES = 2000


def main() -> int:
    """Print a row for each batch and level."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prebuilt_kernels")
    parser.add_argument(
        "--rounds", type=int, default=300, help="steps of each library and batch (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernels (default: %(default)s)")
    options = parser.parse_args()
    libraries = {_NATIVE: load_cpu_ops(machine_flags=NATIVE), "native, built again": _built(*NATIVE, "-DAGAIN")}
    for level in levels_of(platform.machine()):
        if level.needs <= cpu_features():
            libraries[level.name] = CpuOps(load_file(library_for(level)))
    if "avx512f" in cpu_features():
        libraries["native without AVX-512"] = _built(*NATIVE, "-mno-avx512f")
    for ops in libraries.values():
        ops.set_num_threads(options.threads)
    print("| batch | kernels | ms, median | native / these | 95 % interval |\n|---:|---|---:|---:|---|")
    for batch in (1, 8):
        _report(batch, _alternating(_Decode(libraries[_NATIVE], batch), libraries, options.rounds))
    return 0


def _built(*flags: str) -> CpuOps:
    return CpuOps(load_library(machine_flags=flags))


class _Decode:
    """A decode step's weights, keys and values. All libraries use the same memory: its place alone is worth 9 %."""

    def __init__(self, ops: CpuOps, batch: int) -> None:
        torch.manual_seed(1)
        qkv, attention = (_HEADS + 2 * _KV_HEADS) * _DIM, _HEADS * _DIM
        shapes = [(_HIDDEN, qkv), (attention, _HIDDEN), (_HIDDEN, 2 * _INNER), (_INNER, _HIDDEN)]
        self._weights = [[_packed(ops, *shape) for shape in shapes] for _ in range(_LAYERS)]
        blocks = batch * _CONTEXT // _BLOCK
        rows = torch.randn(blocks, _LAYERS * 2 * _KV_HEADS * _DIM * _BLOCK)
        self._pool = KVPool(rows, _LAYERS, _KV_HEADS, _DIM, _BLOCK)
        tables = torch.randperm(blocks).view(batch, -1)
        self._batch = HostBatch.sized(batch, 0, batch, tables.numel())
        self._batch.token_ids[:] = 0
        self._batch.positions[:] = _CONTEXT - 1
        self._batch.slots[0] = tables[:, -1] * _BLOCK + _BLOCK - 1
        self._batch.blocks[0] = tables.flatten()
        self._batch.runs[:] = [(row, _CONTEXT - 1, 1, row * tables.shape[1]) for row in range(batch)]
        self._hidden = torch.randn(batch, _HIDDEN)

    def run(self, ops: CpuOps) -> None:
        step = ops.step(self._batch)
        for layer, (qkv, output, gate_up, down) in enumerate(self._weights):
            query = ops.linear(self._hidden, qkv)[:, : _HEADS * _DIM]
            attended = ops.paged_attention(query, _HEADS, step, self._pool, layer, scale=_DIM**-0.5)
            ops.linear(ops.gated(ops.linear(ops.linear(attended, output), gate_up), "silu"), down)


def _packed(ops: CpuOps, inputs: int, outputs: int) -> Weight:
    return ops.pack((torch.randn(outputs, inputs) / inputs**0.5).bfloat16())


def _alternating(decode: _Decode, libraries: dict[str, CpuOps], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step with each library in each round, after two rounds that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in libraries}
    for number in range(rounds + 2):
        for name in random.sample(list(libraries), len(libraries)):
            started = time.perf_counter()
            decode.run(libraries[name])
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _report(batch: int, seconds: dict[str, list[float]]) -> None:
    native = seconds[_NATIVE]
    for name, own in seconds.items():
        ratios = sorted(
            statistics.median(random.choices(native, k=len(native)))
            / statistics.median(random.choices(own, k=len(own)))
            for _ in range(_RESAMPLES)
        )
        ratio = statistics.median(native) / statistics.median(own)
        low, high = ratios[_RESAMPLES // 40], ratios[-_RESAMPLES // 40]
        print(
            f"| {batch} | {name} | {statistics.median(own) * 1e3:.2f} | {ratio:.3f} | {low:.3f} to {high:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

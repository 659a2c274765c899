"""Measures the machine's limits: bytes read from memory and float32 operations per second.

A C program of a few lines tells; where there is no compiler, torch's own matrix-vector and matrix-matrix products do,
which reach a little less.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.served import ROOT

_MIB = 1 << 20
_FULL_MIB = 1024
"""Several times the largest cache."""
_QUICK_MIB = 64
_NUM_REPEATS = 7
_C_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp")
_SOURCE = r"""
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

typedef float lanes __attribute__((vector_size(64)));
enum { SUMS = 12, STEPS = 20000000 };
static float sink;

static void use(const lanes *sums) {
    lanes all = sums[0];
    for (int i = 1; i < SUMS; i++) all += sums[i];
#pragma omp atomic
    sink += all[0];
}

static double read_all(const lanes *numbers, size_t count) {
    double started = omp_get_wtime();
#pragma omp parallel
    {
        size_t share = count / omp_get_num_threads() / SUMS * SUMS, from = share * omp_get_thread_num();
        lanes sums[SUMS] = {0};
        for (size_t at = from; at < from + share; at += SUMS)
            for (int i = 0; i < SUMS; i++) sums[i] += numbers[at + i];
        use(sums);
    }
    return count * sizeof(lanes) / (omp_get_wtime() - started);
}

static double multiply_add(float factor) {
    double started = omp_get_wtime();
#pragma omp parallel
    {
        lanes sums[SUMS];
        for (int i = 0; i < SUMS; i++) sums[i] = (lanes){0} + (float)i + factor;
        for (long step = 0; step < STEPS; step++)
            for (int i = 0; i < SUMS; i++) sums[i] = sums[i] * factor + factor;
        use(sums);
    }
    return 2.0 * omp_get_max_threads() * STEPS * SUMS * (sizeof(lanes) / sizeof(float)) / (omp_get_wtime() - started);
}

int main(int count, char **words) {
    size_t num_bytes = strtoull(words[1], 0, 10) << 20;
    lanes *numbers = aligned_alloc(64, num_bytes);
    if (!numbers) return 1;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < num_bytes / sizeof(lanes); i++) numbers[i] = (lanes){0} + 1;
    printf("{\"read\": [");
    for (int i = 0; i < REPEATS; i++) printf("%s%g", i ? ", " : "", read_all(numbers, num_bytes / sizeof(lanes)));
    printf("], \"flops\": [");
    for (int i = 0; i < REPEATS; i++) printf("%s%g", i ? ", " : "", multiply_add(0.999f + count * 1e-5f));
    printf("], \"sink\": %g}\n", sink);
    return 0;
}
"""


@dataclass(frozen=True)
class Limits:
    """The best of a few repeats at one moment: what disturbs makes them smaller, never larger."""

    read_bytes_per_second: float
    flops_per_second: float
    how: str

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """Return the least time in which so much can be read and computed, the one beside the other."""
        return max(num_bytes / self.read_bytes_per_second, num_flops / self.flops_per_second)


async def measure(cpus: Sequence[int], folder: Path, *, quick: bool) -> Limits:
    """Measure with one thread on each of these cores."""
    num_mib = _QUICK_MIB if quick else _FULL_MIB
    program = await _compiled(folder)
    command = [str(program), str(num_mib)] if program else [sys.executable, "-m", __name__, str(num_mib)]
    threads = {"OMP_NUM_THREADS": str(len(cpus)), "GOMP_CPU_AFFINITY": " ".join(map(str, cpus))}
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **threads}, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    found = json.loads(answer)
    how = f"{num_mib} MiB read, registers multiplied, by " + ("a C program" if program else "torch")
    return Limits(max(found["read"]), max(found["flops"]), how)


async def _compiled(folder: Path) -> Path | None:
    """Return the program; None where no compiler makes one."""
    program, source = folder / "limits", folder / "limits.c"
    if program.exists():
        return program
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source.write_text(_SOURCE)
    process = await asyncio.create_subprocess_exec(
        compiler,
        *_C_FLAGS,
        f"-DREPEATS={_NUM_REPEATS}",
        str(source),
        "-o",
        str(program),
        stderr=asyncio.subprocess.DEVNULL,
    )
    return None if await process.wait() else program


def _by_torch(num_mib: int) -> None:
    """Print the same, measured with torch; imported here, for a process of its own."""
    import time

    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    columns = 4096
    matrix, vector = torch.ones(num_mib * _MIB // 4 // columns, columns), torch.ones(columns)
    square = torch.ones(2048, 2048)
    read, flops = [], []
    for _ in range(_NUM_REPEATS):
        started = time.perf_counter()
        torch.mv(matrix, vector)
        between = time.perf_counter()
        torch.mm(square, square)
        read.append(4 * matrix.numel() / (between - started))
        flops.append(2 * 2048**3 / (time.perf_counter() - between))
    print(json.dumps({"read": read, "flops": flops}))


if __name__ == "__main__":
    _by_torch(int(sys.argv[1]))

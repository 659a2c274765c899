"""Tests the kernels' thread pool in a C++ program of its own, which reads the pool's counters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tandem_engine.ops.cpu import KernelsUnavailable
from tandem_engine.ops.cpu.compile import SOURCES
from tandem_machine.compiler import find_compiler

USED_UP = """
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>
#define private public
#include "threads.hpp"
#include <cstdio>

int main() {
  tandem::ThreadPool pool(4, {});
  int computed[64] = {};
  pool.run(64, [](void* context, int index) { static_cast<int*>(context)[index]++; }, computed);
  if (std::count(computed, computed + 64, 1) != 64) return std::puts("not every piece was computed once"), 1;
  while (pool.num_asleep_.load() != 3) std::this_thread::yield();  // no helper looks for work any more
  uint64_t before[4];
  for (int i = 0; i < 4; i++) before[i] = pool.tickets_[i].next.load();
  for (int thread = 0; thread < 4; thread++) pool.work(thread);
  for (int i = 0; i < 4; i++)
    if (pool.tickets_[i].next.load() != before[i]) return std::puts("a row that is used up was written"), 1;
}
"""


def test_a_row_of_pieces_that_is_used_up_is_read_and_not_written(tmp_path: Path) -> None:
    """With a write, 64 threads would write 4,096 times per op to lines that all of them share."""
    try:
        command = [find_compiler(), "-std=c++17", "-O1", "-pthread", f"-I{SOURCES.folder}"]
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    source, program = tmp_path / "used_up.cpp", tmp_path / "used_up"
    source.write_text(USED_UP)
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    ended = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")

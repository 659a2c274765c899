"""Kernels are compiled once per machine; where that fails, the error names the reason."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
from tandem_engine.ops.cpu.compile import compile_kernels

COMPILER = """#!/bin/sh
case "$1" in --version) echo "imitation 1.0"; exit 0;; esac
echo compiled >> "{log}"
for last; do :; done
echo library > "$last"
"""

FAILING = """#!/bin/sh
case "$1" in --version) echo "imitation 1.0"; exit 0;; esac
echo "no such flag" >&2
exit 1
"""


def _compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler = folder / "imitation"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def test_any_number_of_workers_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=log))
    cache = tmp_path / "state" / "kernels"
    with ThreadPoolExecutor(8) as workers:
        paths = set(workers.map(lambda _: compile_kernels(cache), range(8)))
    assert len(paths) == 1
    assert paths.pop().read_text() == "library\n"
    assert log.read_text() == "compiled\n"
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".so"], "scratch files are left"


def test_other_flags_make_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log"))
    assert compile_kernels(tmp_path / "c", ["-march=a"]) != compile_kernels(tmp_path / "c", ["-march=b"])


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, FAILING)
    with pytest.raises(KernelsUnavailable, match="no such flag"):
        load_cpu_ops(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_machine_without_a_compiler_is_told_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelsUnavailable, match="install one, such as g\\+\\+"):
        load_cpu_ops(tmp_path / "cache")


def test_a_folder_that_anyone_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log"))
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="writable by everyone"):
        compile_kernels(cache)


def test_a_file_that_is_no_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log"))
    with pytest.raises(KernelsUnavailable, match="delete the file to compile it again"):
        load_cpu_ops(tmp_path / "cache")


FORKED = """
import os, torch
from tests.tandem_engine.ops.cpu_machines import cpu_ops
ops = cpu_ops()
ops.set_num_threads(2)
x, weight = torch.randn(40, 64), ops.pack(torch.randn(500, 64))
before = ops.linear(x, weight)
child = os.fork()
if child == 0:
    same = torch.equal(ops.linear(x, weight), before)
    ops.set_num_threads(3)
    os._exit(0 if same and torch.equal(ops.linear(x, weight), before) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(ops.linear(x, weight), before)
"""


def test_a_forked_child_computes_without_its_parents_threads() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)

"""Kernels are compiled once per machine; where that fails, the error names the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
from tandem_engine.ops.cpu.compile import compile_kernels
from tests.tandem_runtime.test_paths_and_identity import no_home

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


def test_a_compiler_needs_no_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a read-only root there is none: the scratch folder beside the library takes its temporary files."""
    said = tmp_path / "said"
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log") + f'echo "$TMPDIR" > "{said}"\n')
    compile_kernels(tmp_path / "cache")
    assert Path(said.read_text().strip()).parent == tmp_path / "cache"


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


@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [(65_534, 0o700, "belongs to user 65534"), (os.getuid(), 0o775, "writable by its group")],
)
def test_a_library_that_another_user_may_have_planted_is_not_loaded(
    owner: int, mode: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() and owner != os.getuid():
        pytest.skip("only root gives files away")
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log"))
    planted = compile_kernels(tmp_path / "cache")
    os.chown(tmp_path / "cache", owner, -1)
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(KernelsUnavailable, match=said):
        compile_kernels(tmp_path / "cache")
    assert planted.exists()


def test_kernels_are_kept_where_the_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log"))
    no_home(monkeypatch)
    for name in ("XDG_CACHE_HOME", "TANDEM_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # 1. No home and nothing else: the error names what to set.
    with pytest.raises(KernelsUnavailable, match=r"no home folder.*set TANDEM_STATE_DIR"):
        compile_kernels()
    # 2. The state directory, also if the home folder cannot be written.
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    assert compile_kernels().parent == tmp_path / "state" / "kernels"
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert compile_kernels().parent == tmp_path / "state" / "kernels"
    # 3. The home folder where there is one.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_kernels().parent == tmp_path / "home" / ".cache" / "tandem" / "kernels"


def test_a_file_that_is_no_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, COMPILER.format(log=tmp_path / "log"))
    with pytest.raises(KernelsUnavailable, match=r"compile it again, or set XDG_CACHE_HOME .* noexec"):
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

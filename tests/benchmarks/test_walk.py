"""The walk of a request: what idle processes run is left out, and the size of code is counted right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.walk.__main__ import main, without
from benchmarks.walk.code_size import count_classes, count_import_edges, count_lines
from benchmarks.walk.fleet import Recording

TRACER = Path(__file__).parents[2] / "benchmarks" / "walk" / "tracer"


def test_lines_that_an_idle_process_runs_are_left_out_and_so_are_files_without_others() -> None:
    idle = [Recording("gateway", {"a.py": frozenset({1, 2}), "b.py": frozenset({1})})]
    walked = [
        Recording("gateway", {"a.py": frozenset({2, 3}), "b.py": frozenset({1})}),
        Recording("kv", {"b.py": frozenset({1})}),
    ]
    assert [(each.process, dict(each.lines)) for each in without(walked, idle)] == [
        ("gateway", {"a.py": frozenset({3})}),
        ("kv", {"b.py": frozenset({1})}),
    ]


def test_sizes_count_product_code_alone(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/one.py": "from pkg import two\nfrom pkg.sub.three import Three\n\nclass One: ...\n",
        "pkg/two.py": "import pkg.sub.three\n",
        "pkg/sub/three.py": "from typing import *\nif TYPE_CHECKING:\n    from pkg.one import One\nclass Three: ...\n",
        "tests/test_one.py": "class Ignored: ...\n",
        ".venv/lib/other.py": "class Ignored: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert (count_lines(tmp_path), count_classes(tmp_path), count_import_edges(tmp_path, "pkg")) == (9, 2, 4)


def test_the_tracer_records_between_its_two_signals_only(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys\n"
        "def step(n):\n"
        "    if n == 1:\n"
        "        return 'before'\n"
        "    return 'within'\n"
        "step(1)\n"
        f"os.kill(os.getpid(), {int(signal.SIGUSR1)})\n"
        "step(2)\n"
        f"os.kill(os.getpid(), {int(signal.SIGUSR2)})\n"
        "step(1)\n"
    )
    environment = {
        "PYTHONPATH": str(TRACER),
        "TANDEM_WALK_ROOT": f"{tmp_path}{os.sep}",
        "TANDEM_WALK_OUT": str(tmp_path),
    }
    subprocess.run([sys.executable, str(script)], env={**os.environ, **environment}, check=True, timeout=60)
    [file] = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["lines"] == {"program.py": [2, 3, 5]}


def test_a_quick_run_counts_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    file = tmp_path / "figures.json"
    assert main(["--quick", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert figures["product_lines"] > 10_000 and figures["classes"] > 100

"""Every kernel gives the same bits for AVX2, for AVX-512, for arm64, and compiled for this very CPU (law 3)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tandem_engine.ops.cpu.compile import compile_kernels
from tandem_engine.ops.cpu.prebuilt import LEVELS, Level
from tests.tandem_engine.ops.cpu_machines import cpu_ops, has_fma
from tests.tandem_engine.ops.wheel_kernels import KernelBits, own_levels, wheel_library

_WITHOUT_A_RESULT = {"tandem_lanes", "tandem_set_num_threads", "tandem_prefer_huge_pages"}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the hashes of the kernels that are compiled for this machine."""
    if not has_fma():
        pytest.skip("this machine does not fuse products: it is of another numerics class")
    folder = tmp_path_factory.mktemp("bits")
    return KernelBits(_machine(), folder).of(compile_kernels())


@pytest.mark.parametrize("level", [pytest.param(level, id=level.name) for level in LEVELS])
def test_a_wheels_kernels_give_the_bits_of_native_ones(level: Level, native: dict[str, str], tmp_path: Path) -> None:
    if level.machine == _machine() and level not in own_levels():
        pytest.skip(f"this CPU has no {level.name}")
    library = wheel_library(level)
    bits = KernelBits(level.machine, tmp_path)
    for num_threads in (1, 2):
        assert bits.of(library, num_threads) == native, f"{num_threads} threads"
    assert _exported(library) - _WITHOUT_A_RESULT == set(native), "a function that no line is about"


def test_a_difference_would_be_seen(native: dict[str, str], tmp_path: Path) -> None:
    """Kernels that do not fuse products sample alike and multiply otherwise."""
    cpu_ops("sse2")  # else skips the test
    unfused = KernelBits(_machine(), tmp_path).of(compile_kernels(machine_flags=("-march=x86-64",)))
    equal = {name for name, bits in unfused.items() if native[name] == bits}
    assert "tandem_sample" in equal
    assert not equal & {"tandem_linear", "tandem_layers", "tandem_paged_attention", "tandem_encoder_layers"}


def _machine() -> str:
    return own_levels()[0].machine


def _exported(library: Path) -> set[str]:
    command = ["readelf", "--wide", "--dyn-syms", str(library)]
    rows = [
        line.split() for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    ]
    return {row[7] for row in rows if len(row) > 7 and row[4] == "GLOBAL" and row[6].isdigit()}

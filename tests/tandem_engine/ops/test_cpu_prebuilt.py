"""A wheel's kernels are chosen by the features of the CPU; what does not fit is left, and the reason named."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.wheels.libraries import CannotBuild, compiler_for
from tandem_engine.ops.cpu import KernelsUnavailable, prebuilt
from tandem_engine.ops.cpu.library import load_kernels
from tandem_engine.ops.cpu.prebuilt import LEVELS, Level, cpu_features, file_name, levels_of, usable_libraries
from tests.tandem_engine.ops.cpu_machines import cpu_ops
from tests.tandem_engine.ops.wheel_kernels import own_levels, wheel_library

V4, V3, ARM = LEVELS
# What the compiler's macros are called in /proc/cpuinfo, where it is another word.
_IN_CPU_INFO = {
    "sse3": "pni",
    "lzcnt": "abm",
    "bmi": "bmi1",
    "lahf_sahf": "lahf_lm",
    "gcc_have_sync_compare_and_swap_16": "cx16",
}
_ALIASES = {"sse2_math", "sse_math", "evex512", "evex256"}
"""Macros that stand for no feature of their own."""


def _cpus(monkeypatch: pytest.MonkeyPatch, folder: Path, machine: str, *cpus: frozenset[str]) -> None:
    """Make this a machine with these CPUs."""
    name = "Features" if machine == "aarch64" else "flags"
    text = "\n\n".join(f"processor\t: {i}\n{name}\t\t: {' '.join(sorted(cpu))}" for i, cpu in enumerate(cpus))
    (folder / "cpuinfo").write_text(text + "\n")
    monkeypatch.setattr(prebuilt, "_CPU_INFO", folder / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)


def _wheel(folder: Path, *levels: Level) -> Path:
    """Write the folder of a wheel, with files that are no libraries."""
    folder.mkdir()
    for level in levels:
        (folder / file_name(level)).write_text(level.name)
    return folder


def _chosen(folder: Path) -> list[str]:
    return [level.name for level, _ in usable_libraries(folder)[0]]


def test_the_best_level_that_the_cpu_has_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "prebuilt", V4, V3)
    _cpus(monkeypatch, tmp_path, "x86_64", V4.needs | {"avx512_vnni"})
    assert _chosen(wheel) == ["x86-64-v4", "x86-64-v3"]
    _cpus(monkeypatch, tmp_path, "x86_64", V3.needs)
    assert _chosen(wheel) == ["x86-64-v3"]
    _cpus(monkeypatch, tmp_path, "aarch64", ARM.needs | {"sve"})
    assert _chosen(_wheel(tmp_path / "arm", ARM)) == ["aarch64"]


def test_a_single_missing_feature_rules_a_level_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "prebuilt", V4, V3)
    for feature in V4.needs:
        _cpus(monkeypatch, tmp_path, "x86_64", V4.needs - {feature})
        assert _chosen(wheel) == ([] if feature in V3.needs else ["x86-64-v3"])
        assert feature in usable_libraries(wheel)[1]


def test_a_feature_that_one_of_the_cpus_lacks_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cpus(monkeypatch, tmp_path, "x86_64", V4.needs, V3.needs)
    assert _chosen(_wheel(tmp_path / "prebuilt", V4, V3)) == ["x86-64-v3"]


def test_a_machine_that_tells_no_features_takes_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "prebuilt", V4, V3)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt, "_CPU_INFO", tmp_path / "nothing")
    assert _chosen(wheel) == []
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert usable_libraries(wheel) == ([], "there are none for riscv64")


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cpus(monkeypatch, tmp_path, "x86_64", V3.needs)
    wheel = _wheel(tmp_path / "prebuilt")
    (wheel / f"{'0' * 16}-x86-64-v3.so").write_text("of another version")
    found, reason = usable_libraries(wheel)
    assert found == []
    assert f"{file_name(V3)} is missing: the package's compiled kernels are of other sources" in reason


def test_a_broken_library_gives_way_to_the_next_level_and_then_to_the_compiler(tmp_path: Path) -> None:
    cpu_ops()  # else skips the test: there is no compiler
    levels = own_levels()
    wheel = _wheel(tmp_path / "prebuilt", levels[0])
    # 1. The best is no library, the next is one.
    if len(levels) > 1:
        shutil.copy(wheel_library(levels[1]), wheel / file_name(levels[1]))
        assert load_kernels(tmp_path / "cache", wheel).origin == f"prebuilt for {levels[1].name}"
        (wheel / file_name(levels[1])).unlink()
    # 2. A folder in place of the best, and nothing else: compiled, and the log names why.
    origin = load_kernels(None, wheel).origin
    assert re.match(r"compiled on this machine; cannot load .*prebuilt.*(invalid ELF header|file too short)", origin)


def test_without_a_compiler_the_error_names_both_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "prebuilt", *levels_of(own_levels()[0].machine))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelsUnavailable, match=r"install one, such as g\+\+; cannot load .*prebuilt"):
        load_kernels(tmp_path / "cache", wheel)
    with pytest.raises(KernelsUnavailable, match=r"install one, such as g\+\+; the package holds no compiled kernels"):
        load_kernels(tmp_path / "cache", tmp_path / "none")


def test_a_wheel_needs_no_compiler_and_names_the_class_of_native_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    best = own_levels()[0]
    wheel = _wheel(tmp_path / "prebuilt")
    shutil.copy(wheel_library(best), wheel / file_name(best))
    name = cpu_ops().name
    monkeypatch.setenv("PATH", str(tmp_path))
    program = (
        "import sys, pathlib; from tandem_engine.ops.cpu import library, CpuOps\n"
        "kernels = library.load_kernels(None, pathlib.Path(sys.argv[1]))\n"
        "print(CpuOps(kernels.library).name, kernels.origin, sep='|')"
    )
    asked = subprocess.run([sys.executable, "-c", program, str(wheel)], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == f"{name}|prebuilt for {best.name}"


@pytest.mark.parametrize("level", [pytest.param(level, id=level.name) for level in (V4, V3)])
def test_every_feature_that_the_compiler_may_use_is_looked_up(level: Level) -> None:
    """Its macros name the features; one that is not looked up could end a process with an illegal instruction."""
    try:
        compiler = compiler_for(level.machine)
    except CannotBuild as error:
        pytest.skip(str(error))
    macros = subprocess.run(
        [compiler, *level.flags, "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True
    ).stdout
    defined = {name.lower() for name in re.findall(r"^#define __([A-Z0-9_]+)__ 1$", macros, re.MULTILINE)}
    families = ("sse", "ssse", "avx", "bmi", "fma", "f16c", "lzcnt", "movbe", "popcnt", "xsave", "lahf", "mmx", "evex")
    features = {name for name in defined if name.startswith(families) and name not in _ALIASES}
    features |= {name for name in defined if "compare_and_swap_16" in name}
    unknown = {_IN_CPU_INFO.get(name, name) for name in features} - level.needs - {"mmx_with_sse"}
    assert {"avx2", "fma"} <= features and unknown == set()


def test_this_machine_tells_its_features() -> None:
    assert own_levels(), f"neither AVX2 nor NEON: {sorted(cpu_features())}"

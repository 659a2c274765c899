"""`make wheels`: builds the pure wheel, and a wheel with compiled kernels for each kind of machine.

python -m infra.wheels [--platform any|x86_64|aarch64|all] [--out DIR]      exit code 0 built, 1 cannot be built here

The path of each wheel is a line of the output.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra.wheels.libraries import MACHINES, CannotBuild
from infra.wheels.platform_wheel import build_platform_wheel
from infra.wheels.pure import ROOT, build_wheel

_OUT = ROOT / "dist"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the wheels; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        for path in build(options.platform, options.out):
            print(path)
    except CannotBuild as error:
        print(f"no wheel for {options.platform}: {error}", file=sys.stderr)
        return 1
    return 0


def build(wanted: str, out: Path) -> list[Path]:
    """Build the wheels of a platform, or all, into `out`; return their paths. Raises CannotBuild."""
    machines = {"any": (), "all": MACHINES}.get(wanted, (wanted,))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-wheels-") as name:
        folder = Path(name)
        pure = build_wheel(folder)
        made = [pure] if wanted in ("any", "all") else []
        made += [build_platform_wheel(pure, machine, folder) for machine in machines]
        return [Path(shutil.move(path, out / path.name)) for path in made]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--platform",
        choices=("any", *MACHINES, "all"),
        default="all",
        help="any: the pure wheel, whose kernels are compiled at the first start; a machine: the wheel with its "
        "compiled kernels; all: each of them (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=_OUT, metavar="DIR", help="folder of the wheels (default: dist)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Generates gen/ from the .proto files: `python protos/compile.py`. `--check` lists stale files and writes nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
GENERATED = PROTOS / "gen"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; list the stale files and exit with 1 if there are any"
    )
    if parser.parse_args().check:
        return check()
    compile_into(GENERATED)
    return 0


def check() -> int:
    """Compare `gen/` with the output of the installed compiler; list the files that differ, and return 1 if any do."""
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        stale = sorted(_differences(Path(folder), GENERATED))
    for name in stale:
        print(f"stale: protos/gen/{name}; run `python protos/compile.py` and commit the result", file=sys.stderr)
    return 1 if stale else 0


def compile_into(target: Path) -> None:
    """Generate messages, stubs and types of every .proto file into `target`, in packages with `__init__.py`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("tandem/**/*.proto"))
    target.mkdir(parents=True, exist_ok=True)
    outputs = ["--python_out", "--grpc_python_out", "--mypy_out=readable_stubs", "--mypy_grpc_out"]
    flags = [f"{name}:{target}" if "=" in name else f"{name}={target}" for name in outputs]
    plugins = [f"--plugin=protoc-gen-{name}={_plugin(name)}" for name in ("mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *plugins, *flags, *sources]
    subprocess.run(command, check=True, cwd=PROTOS)
    for folder in {(target / source).parent for source in sources}:
        while folder != target:
            (folder / "__init__.py").touch()
            folder = folder.parent


def _plugin(name: str) -> Path:
    return Path(sys.executable).parent / f"protoc-gen-{name}"


def _differences(fresh: Path, committed: Path) -> set[str]:
    roots = fresh, committed
    paths = {path.relative_to(root) for root in roots for path in root.rglob("*.py*") if path.is_file()}
    names = {str(path) for path in paths if "__pycache__" not in path.parts}
    return {name for name in names if _bytes(fresh / name) != _bytes(committed / name)}


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())

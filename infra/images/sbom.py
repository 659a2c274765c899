"""Writes the bill of materials (SBOM) of an image: its Python and its Debian packages, in CycloneDX's JSON form.

python sbom.py [--torch cpu|cuda] PYTHON FILE

Runs in the image's builder stage, where no package of Tandem can be imported. PYTHON is the interpreter of the
environment that the image will have. With --torch, another build of torch ends the build of the image.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

_SPEC_VERSION = "1.6"
_DEBIAN_PACKAGES = Path("/build/debian-packages")
"""What dpkg knows in the image's base: lines of name, version and architecture."""
_TORCH = """
import runpy
from importlib.util import find_spec
from pathlib import Path
version = runpy.run_path(str(Path(find_spec("torch").origin).with_name("version.py")))
print(version["cuda"], version["__version__"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", choices=("cpu", "cuda"), help="which build of torch the environment must have")
    parser.add_argument("python", type=Path)
    parser.add_argument("file", type=Path)
    flags = parser.parse_args()
    if flags.torch and (problem := wrong_torch(flags.python, flags.torch)):
        print(problem, file=sys.stderr)
        return 1
    write_python_packages(flags.python, flags.file)
    document = json.loads(flags.file.read_text())
    document["components"] = [*document.get("components", ()), *debian_packages()]
    flags.file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return 0


def wrong_torch(python: Path, wanted: str) -> str:
    """Return why the environment's torch is not the `wanted` build, or ""."""
    built_for, version = _output_of(str(python), "-c", _TORCH).split()
    is_cuda = built_for != "None"
    if is_cuda == (wanted == "cuda"):
        return ""
    return (
        f"torch {version} is a build for {'CUDA' if is_cuda else 'CPUs'}, this image is for {wanted}; name the index "
        f"or the folder of the other build in the build argument {wanted.upper()}_PIP_OPTIONS"
    )


def write_python_packages(python: Path, file: Path) -> None:
    command = [str(Path(sys.executable).with_name("cyclonedx-py")), "environment", str(python)]
    command += ["--output-reproducible", "--validate", "--spec-version", _SPEC_VERSION]
    subprocess.run([*command, "--output-format", "JSON", "--output-file", str(file)], check=True)


def debian_packages() -> list[dict[str, Any]]:
    """Return a component for each Debian package of the base."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    distribution = f"debian-{release.get('VERSION_ID', '').strip(chr(34))}"
    components = []
    for line in _DEBIAN_PACKAGES.read_text().splitlines():
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}&distro={distribution}"
        components.append({"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl})
    return components


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())

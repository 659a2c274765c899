"""Fetches the page's libraries from npm into control_plane/web/vendor: `python -m infra.site.vendor_web`.

Each file is a file of the npm package, but for two changes: the import of `preact` names the file beside it, and the
comment that names a source map is gone. `manifest.json` has each library's version, licence and npm integrity, and each
file's sha256. `--check` compares the files with the manifest and fetches nothing.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "control_plane" / "web" / "vendor"
MANIFEST = FOLDER / "manifest.json"
_SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*\Z")


@dataclass(frozen=True)
class Library:
    """One npm package, and the files that the page takes of it: path in the package by name in the folder."""

    name: str
    version: str
    licence: str
    files: dict[str, str]


LIBRARIES = (
    Library(
        "preact",
        "11.2.0",
        "MIT",
        {"preact.js": "dist/preact.mjs", "hooks.js": "hooks/dist/hooks.mjs", "LICENSE.preact": "LICENSE"},
    ),
    Library("htm", "3.1.1", "Apache-2.0", {"htm.js": "dist/htm.module.js", "LICENSE.htm": "LICENSE"}),
    Library(
        "uplot",
        "1.6.32",
        "MIT",
        {"uplot.js": "dist/uPlot.esm.js", "LICENSE.uplot": "LICENSE"},
    ),
)


def _packed(library: Library, folder: Path) -> bytes:
    """Return the package as npm packs it."""
    command = ["npm", "pack", "--silent", f"{library.name}@{library.version}", "--pack-destination", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob(f"{library.name}-*.tgz")
    return archive.read_bytes()


def _rewritten(content: bytes) -> bytes:
    return _SOURCE_MAP.sub(b"\n", content.replace(b'from"preact"', b'from"./preact.js"'))


def _fetch(library: Library) -> dict[str, Any]:
    """Write the library's files; return its entry of the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        packed = _packed(library, Path(folder))
    hashes: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for name, path in library.files.items():
            member = archive.extractfile(f"package/{path}")
            assert member is not None, f"{library.name} has no {path}"
            content = member.read()
            content = content if name.startswith("LICENSE") else _rewritten(content)
            (FOLDER / name).write_bytes(content)
            hashes[name] = hashlib.sha256(content).hexdigest()
    integrity = base64.b64encode(hashlib.sha512(packed).digest()).decode()
    return {
        "name": library.name,
        "version": library.version,
        "licence": library.licence,
        "integrity": f"sha512-{integrity}",
        "files": hashes,
    }


def problems() -> list[str]:
    """Return what differs between the folder, its manifest and the list of libraries."""
    entries: list[dict[str, Any]] = json.loads(MANIFEST.read_text())
    found = [
        f"the manifest has {entry['name']} {entry['version']}, not as listed in infra/site/vendor_web.py"
        for entry in entries
        if (entry["name"], entry["version"], entry["licence"])
        not in {(each.name, each.version, each.licence) for each in LIBRARIES}
    ]
    listed = {name: digest for entry in entries for name, digest in entry["files"].items()}
    there = {path.name for path in FOLDER.iterdir()} - {MANIFEST.name}
    found += [f"{name} is in the folder or in the manifest only" for name in sorted(there ^ set(listed))]
    for name in sorted(there & set(listed)):
        if hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() != listed[name]:
            found.append(f"{name} is not the file whose sha256 the manifest has")
    return found


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m infra.site.vendor_web", description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true", help="compare the files with the manifest; fetch nothing")
    if not options.parse_args().check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        MANIFEST.write_text(json.dumps([_fetch(library) for library in LIBRARIES], indent=2) + "\n")
    for problem in problems():
        print(problem, file=sys.stderr)
    return 1 if problems() else 0


if __name__ == "__main__":
    sys.exit(main())

"""Follows the README in a Debian system of its own, as a user without rights: `make container-test`.

debootstrap makes the system, once, in build/debian. The user has no name, a read-only root, 64 MB of /dev/shm and at
most 256 processes and threads; only the home folder and /tmp can be written. The commands are those of README.md, word
for word. Needs root (namespaces), debootstrap, bubblewrap, and what pip needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.system.container import ROOT, USER, Container, running

_SYSTEM = ROOT / "build" / "debian"
_PACKAGES = ("python3", "python3-venv", "make", "g++", "curl", "ca-certificates")
_HOME = Path("/home/user")
_CLONE = _HOME / "tandem"
_PIP_FOLDERS = ("/opt", "/etc/pip.conf", "/etc/resolv.conf", "/etc/ssl/certs")
"""What a pip that is set up for this machine may need; missing ones are left out."""


def main() -> int:
    """Run every command; return 0 if each did what README says."""
    if not (_SYSTEM / "usr" / "bin" / "g++").exists():
        make_system(_SYSTEM, _PACKAGES, mounted=(_HOME, *map(Path, _PIP_FOLDERS)))
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        home = Path(folder)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(home / "tandem")], check=True)
        for path in [home, *home.rglob("*")]:
            os.chown(path, USER, USER, follow_symlinks=False)
        home.chmod(0o700)
        _follow_readme(home)
    return 0


def make_system(folder: Path, packages: Sequence[str], mounted: Sequence[Path]) -> None:
    """Make a Debian system of this machine's release, with places for `mounted`. Raises CalledProcessError."""
    release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    suite = release[1] if release else "stable"
    shutil.rmtree(folder, ignore_errors=True)
    included = f"--include={','.join(packages)}"
    subprocess.run(["debootstrap", "--variant=minbase", included, suite, str(folder)], check=True)
    for path in mounted:
        target = folder / path.relative_to("/")
        if path.is_file():
            target.unlink(missing_ok=True)
            target.touch()
        else:
            target.mkdir(parents=True, exist_ok=True)


def _follow_readme(home: Path) -> None:
    container = Container(
        root=_SYSTEM,
        folder=_CLONE,
        writable=("/tmp",),
        mounts=(
            *("--bind", str(home), str(_HOME)),
            *(word for path in _PIP_FOLDERS for word in ("--ro-bind-try", path, path)),
        ),
        environment={"HOME": str(_HOME), **pip_variables()},
        is_isolated=False,  # pip needs the network
    )
    readme = (ROOT / "README.md").read_text()
    with _told("make run"), running(container, "make", "run") as up:
        up.until("Ctrl-C drains")
        for command, expected in _commands(readme):
            with _told(command), running(container, "sh", "-c", command) as ran:
                assert ran.wait() == 0, "\n".join(ran.lines)
                assert expected in "".join(ran.lines), "\n".join(ran.lines)
        up.press_ctrl_c()  # make itself ends with an error then
        assert "Stopped." in "\n".join(up.lines), "\n".join(up.lines)


def _commands(readme: str) -> Iterator[tuple[str, str]]:
    """Yield the README's commands for a fleet that runs, each with a part of what it prints."""
    [curl] = re.findall(r"```\n(curl -N [^`]+)```", readme)
    yield curl, "data: [DONE]"
    [program] = re.findall(r"```python\n(from tandem_client import AI\n[^`]+)```", readme)
    yield f".venv/bin/python - <<'END'\n{program}END", "stream"
    [question] = re.findall(r"`(\.venv/bin/tandem run [^`]+)`", readme)
    yield question, "42"
    yield ".venv/bin/tandem status", "@tandem/demo"


def pip_variables() -> dict[str, str]:
    """Return the variables of this machine's pip."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_CERT"))}


@contextmanager
def _told(command: str) -> Iterator[None]:
    """Print the command, and after it that it did what it should."""
    print(f"$ {command}", file=sys.stderr, flush=True)
    yield
    print(f"  as README says: {command.splitlines()[0]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

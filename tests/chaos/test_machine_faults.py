"""Tests of the faults of the machine: what they do to a process, and that they are undone."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.descriptors import used_up
from tests.chaos.surroundings import mount_namespace

_OPENS = """
import os
print("here", flush=True)
for line in iter(input, "end"):
    opened = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
            if len(opened) == 9:
                break
    except OSError as error:
        print(len(opened), error.errno, flush=True)
    else:
        print("many", flush=True)
    for each in opened:
        os.close(each)
"""


@pytest.mark.parametrize("gap", [False, True])
def test_descriptors_are_used_up_until_the_end_of_the_block(gap: bool) -> None:
    kept = os.open("/dev/null", os.O_RDONLY)
    inherited = [os.dup(kept) for _ in range(6)][::2] if gap else []  # then numbers above the count are open
    with subprocess.Popen(
        [sys.executable, "-c", _OPENS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=inherited,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def opened() -> list[str]:
            assert process.stdin is not None and process.stdout is not None
            print("go", file=process.stdin, flush=True)
            return process.stdout.readline().split()

        assert process.stdout.readline() == "here\n"
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        with used_up(process.pid, num_left=2):
            assert opened() == ["2", str(errno.EMFILE)]
        assert opened() == ["many"]
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == before
        print("end", file=process.stdin, flush=True)


_ON_A_SMALL_DISK = """
import errno, sys
from pathlib import Path
from tests.chaos.small_disk import SmallDisk

def refused(work):
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno]
    return ""

disk = SmallDisk(Path(sys.argv[1]), 4 << 20)
file = disk.folder / "file"
file.write_bytes(bytes(8192))
with disk.filled() as fill:
    fill()
    print(refused(lambda: (disk.folder / "another").write_bytes(bytes(1))), end=" ")
    file.write_bytes(b"")  # gives two pages back
    fill()
    print(refused(lambda: (disk.folder / "another").write_bytes(bytes(1))), end=" ")
file.write_bytes(bytes(8192))
with disk.read_only():
    for work in (file.unlink, lambda: file.write_bytes(b"x"), lambda: file.rename(disk.folder / "moved")):
        print(refused(work), end=" ")
    print(len(file.read_bytes()), end=" ")
file.write_bytes(b"x")
print(sorted(each.name for each in disk.folder.iterdir()))
disk.unmount()
"""


def test_a_small_disk_is_full_or_read_only_until_the_end_of_the_block(tmp_path: Path) -> None:
    namespace = mount_namespace()
    if not namespace:
        pytest.skip("this process gets no mount namespace")
    command = [*namespace, sys.executable, "-c", _ON_A_SMALL_DISK, str(tmp_path / "disk")]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    wanted = "ENOSPC ENOSPC EROFS EROFS EROFS 8192 ['another', 'file']\n"
    assert found.stdout == wanted, found.stderr
    assert list((tmp_path / "disk").iterdir()) == [], "mounted in the namespace only"

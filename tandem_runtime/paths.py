"""Locates Tandem's files and sockets on this machine."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from tandem_machine.folders import home_folder
from tandem_runtime.errors import InvalidRequest

MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes, the last of them zero (unix(7))."""


def state_dir(configured: str | Path | None = None, setting: str = "TANDEM_STATE_DIR") -> Path:
    """Return the folder for persistent state. Creates it if missing, readable by its user only.

    The first of `configured`, TANDEM_STATE_DIR, XDG_STATE_HOME/tandem, ~/.local/state/tandem. `setting` is the name of
    the flag or variable that `configured` comes from. Raises InvalidRequest for a folder of another user.
    """
    if configured:
        return _own_folder(Path(configured).expanduser(), setting)
    if chosen := os.environ.get("TANDEM_STATE_DIR"):
        return _own_folder(Path(chosen).expanduser(), "TANDEM_STATE_DIR")
    if base := os.environ.get("XDG_STATE_HOME"):
        return _own_folder(Path(base) / "tandem", "TANDEM_STATE_DIR")
    if (home := home_folder()) is None:
        raise InvalidRequest(
            f"user {os.getuid()} has no home folder (no HOME, no entry in passwd) for the state of this process; "
            "set TANDEM_STATE_DIR to a folder that can be written"
        )
    return _own_folder(home / ".local" / "state" / "tandem", "TANDEM_STATE_DIR")


def runtime_dir(configured: str | Path | None = None) -> Path:
    """Return the folder for sockets. Creates it if missing. Short, because Unix socket paths end at 108 bytes.

    The first of `configured`, TANDEM_RUNTIME_DIR, XDG_RUNTIME_DIR/tandem, /tmp/tandem-<uid>. Raises InvalidRequest for
    a folder of another user, or without the right to write.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if chosen := configured or os.environ.get("TANDEM_RUNTIME_DIR"):
        wanted = Path(chosen).expanduser()
    elif base and os.access(base, os.W_OK):
        wanted = Path(base) / "tandem"
    else:
        wanted = Path(f"/tmp/tandem-{os.getuid()}")
    folder = _own_folder(wanted, "TANDEM_RUNTIME_DIR")
    if not os.access(folder, os.W_OK | os.X_OK):  # such as on a read-only mount
        raise InvalidRequest(f"cannot write in the folder {folder}; set TANDEM_RUNTIME_DIR to one that can be written")
    return folder


def socket_path(name: str, configured: str | Path | None = None) -> Path:
    """Return `name` in the runtime folder; raises InvalidRequest if the path is too long for a Unix socket."""
    path = runtime_dir(configured) / name
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(
            f"the socket path {path} has {num_bytes} bytes, Unix takes {MAX_SOCKET_PATH_BYTES}; "
            "set TANDEM_RUNTIME_DIR to a shorter folder"
        )
    return path


def forget_dead_sockets(pattern: str, configured: str | Path | None = None) -> None:
    """Remove the sockets of killed processes: sockets in the runtime folder without a listener."""
    for path in runtime_dir(configured).glob(pattern):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:  # not looked up by process id: the owner may be in another container
                path.unlink(missing_ok=True)
            except OSError:
                continue  # some other state: leave the socket alone


def _own_folder(path: Path, variable: str) -> Path:
    """Make `path` with mode 0700; refuse a folder of another user, who could read or replace its files."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        link, folder = path.lstat(), path.stat()
    except OSError as error:
        raise InvalidRequest(
            f"cannot make the folder {path}: {error}; set {variable} to one that can be written"
        ) from error
    if not stat.S_ISDIR(folder.st_mode) or {link.st_uid, folder.st_uid} != {os.getuid()}:
        raise InvalidRequest(
            f"{path} is not a folder of user {os.getuid()} (owner: {folder.st_uid}); set {variable} to another one"
        )
    if stat.S_IMODE(folder.st_mode) & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise InvalidRequest(
                f"cannot close {path} to other users: {error}; set {variable} to one that can be written"
            ) from error
    return path

"""Finds the compiled library of routing: the one that a platform wheel brings, or one that this machine compiles.

Without either, Python and numpy do the same, and a decision takes 2.8 times as long.
"""

from __future__ import annotations

import platform
from pathlib import Path

from control_plane.routing.compiled_library import PREBUILT, SOURCES, CompiledRouting, file_name
from tandem_machine.compiler import CannotCompile, compile_library
from tandem_runtime.log import get_logger

log = get_logger(__name__)


_COMPILE_SECONDS = 15.0
"""It takes half a second. A gateway that starts waits for it."""


def load_routing(folder: Path | None = None, prebuilt: Path = PREBUILT) -> CompiledRouting | None:
    """Load the wheel's library, or compile it into `folder` or the user's cache; None: the log says why not."""
    path, why = prebuilt / file_name(platform.machine()), ""
    if path.is_file():
        try:
            return _loaded(path, "the package")
        except (OSError, AttributeError) as error:
            why = f"cannot load {path}: {error}; "
    try:
        path = compile_library(SOURCES, folder, (), seconds=_COMPILE_SECONDS)
        return _loaded(path, "compiled on this machine")
    except CannotCompile as error:
        why += f"{error}"
    except (OSError, AttributeError) as error:
        why += f"cannot load {path}: {error}; delete the file to compile it again"
    log.info("routing_not_compiled", reason=why, effect="numpy chooses the routes, more slowly")
    return None


def _loaded(path: Path, origin: str) -> CompiledRouting:
    library = CompiledRouting(path)
    log.info("routing_compiled", origin=origin, path=str(path))
    return library

"""Finds the compiled library of routing: the one that a platform wheel brings, or one that this machine compiles.

Without either, numpy does the same, and a decision takes 1.6 times as long.
"""

from __future__ import annotations

import platform
from pathlib import Path

from control_plane.routing.compiled_library import PREBUILT, SOURCES, CompiledRouting, file_name
from tandem_machine.compiler import CannotCompile, compile_library
from tandem_runtime.log import get_logger

log = get_logger(__name__)


def load_routing(folder: Path | None = None, prebuilt: Path = PREBUILT) -> CompiledRouting | None:
    """Load the wheel's library, or compile it into `folder` or the user's cache; None: the log says why not."""
    path, origin = prebuilt / file_name(platform.machine()), "the package"
    try:
        if not path.is_file():
            path, origin = compile_library(SOURCES, folder, ()), "compiled on this machine"
        library = CompiledRouting(path)
    except (CannotCompile, OSError, AttributeError) as error:
        log.info("routing_not_compiled", reason=str(error), effect="numpy chooses the routes, more slowly")
        return None
    log.info("routing_compiled", origin=origin, path=str(path))
    return library

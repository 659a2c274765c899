"""Imports transformers.models without reading its files a second time.

transformers reads the 2,000 files of its models when it is imported, to know their names, and again when the package of
its models is: 0.25 of the 2.5 seconds of processor time that an engine takes to start (transformers 5.23).
"""

from __future__ import annotations

import importlib
from typing import Any

_PREFIX = "models."


def import_models_package() -> None:
    """Import transformers, then transformers.models with the names that transformers has found."""
    transformers: Any = importlib.import_module("transformers")
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    found: dict[str, list[str]] = getattr(transformers, "_import_structure", {})
    names = {name.removeprefix(_PREFIX): set(each) for name, each in found.items() if name.startswith(_PREFIX)}
    read_files = getattr(utils, "define_import_structure", None)
    if not names or read_files is None:  # a release that keeps them elsewhere reads its files again
        return
    utils.define_import_structure = lambda *_, **__: {frozenset[str](): names}
    try:
        importlib.import_module("transformers.models")
    finally:
        utils.define_import_structure = read_files

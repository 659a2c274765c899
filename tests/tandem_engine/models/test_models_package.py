"""transformers.models has all its names, from one reading of its files."""

from __future__ import annotations

import subprocess
import sys

_PROBE = """
import sys
if sys.argv[1] == "ours":
    from tandem_engine.models.models_package import import_models_package
    import builtins
    opened = []
    real = builtins.open
    builtins.open = lambda path, *rest, **named: opened.append(str(path)) or real(path, *rest, **named)
    import_models_package()
    builtins.open = real
    print(sum(path.endswith("modeling_llama.py") for path in opened))
import transformers
from transformers.utils.import_utils import define_import_structure
from transformers import models
print(sorted(models._class_to_module.items()))
print(models.llama.LlamaConfig, define_import_structure.__module__)
"""


def _printed(whose: str) -> list[str]:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, whose], capture_output=True, text=True, check=True, timeout=120
    )
    return probe.stdout.splitlines()


def test_the_package_has_the_same_names_and_each_file_was_read_once() -> None:
    num_readings, *ours = _printed("ours")
    assert num_readings == "1"
    assert ours == _printed("theirs")

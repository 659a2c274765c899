"""Converts a checkpoint for OpenVINO. Runs in the venv of optimum-intel.

python -m benchmarks.peers.convert_openvino FOLDER TARGET
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(folder: Path, target: Path) -> None:
    """Write the model in float32, and its tokenizer, which the pipeline loads though nobody asks it anything."""
    export: Any = importlib.import_module("optimum.exporters.openvino")
    config: Any = importlib.import_module("optimum.intel").OVConfig(dtype="fp32")
    export.main_export(str(folder), target, task="text-generation-with-past", ov_config=config, trust_remote_code=False)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

"""Makes draft models that always agree with their target, or never.

Run as a module, with a folder and a shape, it makes a stranger: it needs torch, and sets its dtype.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import random_model
from benchmarks.lib.engine_models import SHAPES
from benchmarks.lib.served import ROOT
from benchmarks.peers import places
from tandem_engine.demo import checkpoint_path

_NUM_TIMES = 8
_ADDS = ("self_attn.o_proj.", "mlp.down_proj.")
"""Behind these a layer's work is added to what came in."""


def deep_demo() -> Path:
    """Return the built-in model with eight times its layers, made where it is not there yet.

    The added ones add nothing: it says what the built-in model says, and takes eight times as long for it.
    """
    target = places.MODELS / f"demo-times-{_NUM_TIMES}"
    if not target.exists():
        unfinished = target.with_name(f"unfinished-{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(checkpoint_path(), unfinished)
        _deepen(unfinished)
        unfinished.rename(target)
    return target


def stranger(shape: str) -> Path:
    """Return a model of the same vocabulary, of other weights and a sixth of the layers, made where it is not there."""
    target = places.MODELS / f"{shape}-stranger"
    if not target.exists():
        unfinished = target.with_name(f"unfinished-{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.speculation.draft_models", str(unfinished), shape], cwd=ROOT, check=True
        )
        unfinished.rename(target)
    return target


def _make_stranger(folder: Path, shape: str) -> None:
    layers = {"num_hidden_layers": -(-SHAPES[shape]["num_hidden_layers"] // 6)}
    random_model.SHAPES["stranger"] = SHAPES[shape] | layers
    random_model.make(folder, "stranger")


def _deepen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    numbers: Any = importlib.import_module("safetensors.torch")
    (file,) = folder.glob("*.safetensors")
    tensors = numbers.load_file(file)
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers."):
            index, part = name.removeprefix("model.layers.").split(".", 1)
            added = tensor * 0 if part.startswith(_ADDS) else tensor
            for times in range(1, _NUM_TIMES):
                tensors[f"model.layers.{int(index) + times * num_layers}.{part}"] = added.clone()
    numbers.save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": _NUM_TIMES * num_layers}, indent=2))


if __name__ == "__main__":
    _make_stranger(Path(sys.argv[1]), sys.argv[2])

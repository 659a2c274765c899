"""Makes the checkpoints that all engines get: random weights per shape, in each engine's format.

Run as a module it makes one: it needs torch, which has no place in a process that measures.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib import random_model
from benchmarks.lib.served import ROOT
from benchmarks.peers import places

Form = Literal["bf16", "fp32", "gguf_f32", "gguf_bf16", "openvino"]
"""bf16 is what the numbers are; all others hold the same numbers, widened (gguf_bf16: as they were)."""

SHAPE_S: dict[str, Any] = {
    **random_model.SHAPE_M,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
"""Shape S of the engine's measurements: 125 million parameters."""
SHAPES: dict[str, dict[str, Any]] = {"S": SHAPE_S, "M": random_model.SHAPE_M, "tiny": random_model.TINY}
_BYTES = {"bf16": 2, "fp32": 4, "gguf_f32": 4, "gguf_bf16": 2, "openvino": 4}


@dataclass(frozen=True)
class ShapeFacts:
    """What a shape costs, from its numbers alone."""

    shape: dict[str, Any]

    @property
    def num_step_parameters(self) -> int:
        """Read in every step: all but the embedding, of which a step reads a few rows."""
        shape = self.shape
        attention = shape["head_dim"] * (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"])
        of_layer = shape["hidden_size"] * (attention + 3 * shape["intermediate_size"] + 2)
        return int(shape["num_hidden_layers"] * of_layer + self._head + shape["hidden_size"])

    @property
    def num_parameters(self) -> int:
        return self.num_step_parameters + self._head

    @property
    def num_body_parameters(self) -> int:
        """Multiplied with every token of a prompt; the head only with its last."""
        return self.num_step_parameters - self._head

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, float32."""
        shape = self.shape
        return int(shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"] * 4)

    def attention_flops(self, num_keys: int) -> int:
        """Of one query position that sees so many keys, all layers."""
        shape = self.shape
        return int(4 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * num_keys)

    @property
    def _head(self) -> int:
        return int(self.shape["hidden_size"] * self.shape["vocab_size"])


def weight_bytes(shape: str, form: Form) -> int:
    """Return the bytes that all weights take in memory in that form."""
    return ShapeFacts(SHAPES[shape]).num_parameters * _BYTES[form]


def made(shape: str, form: Form) -> Path:
    """Return the checkpoint, made where it is not there yet. Raises subprocess.CalledProcessError if that fails."""
    target = _place(shape, form)
    if not target.exists():
        places.MODELS.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"unfinished-{target.name}")
        _remove(unfinished)
        _make(shape, form, unfinished)
        unfinished.rename(target)
    return target


def _place(shape: str, form: Form) -> Path:
    return places.MODELS / (f"{shape}-{form}.gguf" if form.startswith("gguf") else f"{shape}-{form}")


def _make(shape: str, form: Form, target: Path) -> None:
    match form:
        case "bf16":
            _run(sys.executable, "benchmarks.lib.engine_models", "random", shape, str(target))
        case "fp32":
            _run(sys.executable, "benchmarks.lib.engine_models", "widen", str(made(shape, "bf16")), str(target))
        case "openvino":
            _run(places.OPTIMUM_PYTHON, "benchmarks.peers.convert_openvino", str(made(shape, "fp32")), str(target))
        case _:
            number = form.removeprefix("gguf_")
            python = places.LLAMA_CPP_PYTHON
            _run(python, "benchmarks.peers.convert_gguf", str(made(shape, "fp32")), str(target), number)


def _run(python: Path | str, module: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))}
    command = [str(python), "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}; its output is above")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_random(shape: str, target: Path) -> None:
    random_model.SHAPES[shape] = SHAPES[shape]
    random_model.make(target, shape)


def _widen(source: Path, target: Path) -> None:
    """Write the same numbers in float32."""
    numbers: Any = importlib.import_module("safetensors.torch")
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors = {name: tensor.float() for name, tensor in numbers.load_file(file).items()}
            numbers.save_file(tensors, target / file.name, metadata={"format": "pt"})
        elif file.name == "config.json":
            config = {**json.loads(file.read_text()), "dtype": "float32"}
            (target / file.name).write_text(json.dumps(config, indent=2) + "\n")
        elif file.name != "model.safetensors.index.json":
            shutil.copyfile(file, target / file.name)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["random", shape, target]:
            _make_random(shape, Path(target))
        case ["widen", source, target]:
            _widen(Path(source), Path(target))

"""Writes a training run to disk, so that a kill at any moment leaves a complete state.

runs/demo/
  tokenizer.json      made once
  settings.json       the run's settings; a resumed run keeps them
  state-N/            the state after N steps: weights, average, optimiser (safetensors) and progress (JSON)
  LATEST              the name of the newest complete state; replaced last
  loss.jsonl          one line per logged step
  pid                 the training process, while it runs
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class TrainingState:
    """The state that a run needs to continue; the state of the data stream is the number of steps."""

    step: int
    num_tokens: int
    seconds: float
    cool_down_start: int | None
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    optimiser: dict[str, Tensor]

    @property
    def progress(self) -> dict[str, Any]:
        """Return the fields that are not tensors."""
        return {name: getattr(self, name) for name in ("step", "num_tokens", "seconds", "cool_down_start")}


_TENSOR_FIELDS = ("weights", "average", "optimiser")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one move, after its bytes are on disk."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class RunFolder:
    """One training run's folder. Only the training process writes here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer_path = path / "tokenizer.json"
        self.loss_path = path / "loss.jsonl"
        self.pid_path = path / "pid"
        self._settings_path = path / "settings.json"
        self._latest_path = path / "LATEST"

    def save_settings(self, settings: Any) -> None:
        """Write the settings (a dataclass) that the run was started with."""
        write_atomically(self._settings_path, json.dumps(asdict(settings), indent=2) + "\n")

    def load_settings(self) -> dict[str, Any]:
        """Read the settings of the run."""
        settings: dict[str, Any] = json.loads(self._settings_path.read_text())
        return settings

    @property
    def has_state(self) -> bool:
        """Return whether there is a complete state to continue from."""
        return self._latest_path.exists()

    def save_state(self, state: TrainingState) -> None:
        """Write a state beside the last one, then point LATEST at it, then delete older ones."""
        folder = self.path / f"state-{state.step}"
        partial = self.path / f"state-{state.step}.partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for field in _TENSOR_FIELDS:
            save_file(_contiguous(getattr(state, field)), str(partial / f"{field}.safetensors"))
        write_atomically(partial / "progress.json", json.dumps(state.progress) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        write_atomically(self._latest_path, folder.name + "\n")
        self._delete_other_states(folder.name)

    def load_state(self) -> TrainingState:
        """Read the newest complete state."""
        folder = self.path / self._latest_path.read_text().strip()
        tensors = {field: load_file(str(folder / f"{field}.safetensors")) for field in _TENSOR_FIELDS}
        progress: dict[str, Any] = json.loads((folder / "progress.json").read_text())
        return TrainingState(**progress, **cast(dict[str, Any], tensors))

    def _delete_other_states(self, kept: str) -> None:
        for folder in self.path.glob("state-*"):
            if folder.name != kept:
                shutil.rmtree(folder, ignore_errors=True)

    def log(self, record: dict[str, Any]) -> None:
        """Append one JSON line to the loss curve."""
        with self.loss_path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}

"""Trains the built-in model: `python -m demo_model.train --out runs/demo --minutes 25 --threads 1`.

The run can be stopped at any moment (Ctrl-C or SIGTERM save the state first) and continues with `--resume`.
`--cool-down N` lowers the learning rate to its end over N steps; use a copy of the run (`--start-from`) if the run
itself is to continue.
"""

import argparse
import ctypes
import os
import platform
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from demo_model.batches import BatchStream
from demo_model.chat_format import ChatEncoder
from demo_model.model import DemoModel, ModelShape
from demo_model.optimiser import TrainingOptimiser, WeightAverage
from demo_model.run_folder import RunFolder, TrainingState
from demo_model.schedule import Schedule
from demo_model.tokenizer import load_tokenizer, train_tokenizer

_GRADIENT_LIMIT = 1.0
_LOG_EVERY_STEPS = 10
_LIBC = ctypes.CDLL("libc.so.6") if platform.libc_ver()[0] == "glibc" else None


@dataclass(frozen=True)
class TrainingSettings:
    """The settings that decide a run's numbers; stored with the run, so that resuming cannot change them."""

    seed: int = 1
    tokens_per_batch: int = 4096
    peak_learning_rate: float = 4e-3
    warmup_steps: int = 100
    use_muon: bool = True
    dtype: str = "float32"
    shape: ModelShape = field(default_factory=ModelShape)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "TrainingSettings":
        """Read the result of `dataclasses.asdict`."""
        return cls(**{**stored, "shape": ModelShape(**stored["shape"])})


@dataclass(frozen=True)
class Limits:
    """The limits of this process, whichever comes first; None means no limit."""

    steps: int | None = None
    minutes: float | None = None
    save_every_seconds: float = 120.0


def fastest_dtype() -> str:
    """Return bfloat16 where the CPU multiplies it natively (2.2 times fp32 on a Zen 4 core), else float32."""
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"


class Trainer:
    """Owns the model, its optimiser and its average, and takes one step after another."""

    def __init__(self, settings: TrainingSettings, folder: RunFolder, cool_down_steps: int = 0) -> None:
        self.settings = settings
        self.folder = folder
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self._cool_down_steps = cool_down_steps
        self._cool_down_start: int | None = None
        self.model = DemoModel(settings.shape, settings.seed, getattr(torch, settings.dtype))
        self._optimiser = TrainingOptimiser(self.model, use_muon=settings.use_muon)
        self._average = WeightAverage(self.model.named_parameters())
        encoder = ChatEncoder(load_tokenizer(folder.tokenizer_path))
        self._batches = BatchStream(encoder, settings.seed, settings.tokens_per_batch)

    @property
    def schedule(self) -> Schedule:
        """Return the learning rate's schedule, with the cool-down if one has begun."""
        settings = self.settings
        return Schedule(
            settings.peak_learning_rate, settings.warmup_steps, self._cool_down_start, self._cool_down_steps
        )

    def restore(self, state: TrainingState) -> None:
        """Restore a saved state."""
        self.step, self.num_tokens, self.seconds = state.step, state.num_tokens, state.seconds
        self._cool_down_start = state.cool_down_start
        self.model.load_state_dict(state.weights)
        self._average.tensors = {name: tensor.clone() for name, tensor in state.average.items()}
        self._optimiser.load_state_tensors(state.optimiser)

    def state(self) -> TrainingState:
        """Return the state for `restore`."""
        return TrainingState(
            self.step, self.num_tokens, self.seconds, self._cool_down_start,
            dict(self.model.named_parameters()), self._average.tensors, self._optimiser.state_tensors(),
        )  # fmt: skip

    def begin_cool_down(self) -> None:
        """Start the cool-down, unless it has started."""
        if self._cool_down_steps and self._cool_down_start is None:
            self._cool_down_start = self.step

    def take_step(self) -> float:
        """Train on one batch and return its loss."""
        started = time.perf_counter()
        batch = self._batches.batch(self.step)
        loss = self.model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_LIMIT)
        self._optimiser.step(self.schedule.learning_rate(self.step))
        self.step += 1
        self._average.update(self.model.named_parameters(), self.step)
        self.num_tokens += int((batch.documents >= 0).sum())
        self.seconds += time.perf_counter() - started
        return float(loss.detach())

    def is_cooled_down(self) -> bool:
        """Return whether the cool-down has ended."""
        end = self.schedule.end
        return end is not None and self._cool_down_steps > 0 and self.step >= end


def _log(trainer: Trainer, losses: list[float], started: tuple[float, int]) -> None:
    seconds, num_tokens = trainer.seconds - started[0], trainer.num_tokens - started[1]
    record = {
        "step": trainer.step,
        "loss": round(sum(losses) / len(losses), 4),
        "learning_rate": round(trainer.schedule.learning_rate(trainer.step - 1), 6),
        "num_tokens": trainer.num_tokens,
        "tokens_per_second": round(num_tokens / max(seconds, 1e-9)),
        "seconds": round(trainer.seconds, 1),
    }
    trainer.folder.log(record)
    print(record, flush=True)


class _StopRequest:
    """Set by SIGTERM and Ctrl-C; the loop checks it after each step."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


def train(trainer: Trainer, limits: Limits) -> None:
    """Take steps until a limit or a signal, logging the loss and saving the state along the way and at the end."""
    stop, started, saved = _StopRequest(), time.monotonic(), time.monotonic()
    losses: list[float] = []
    mark = (trainer.seconds, trainer.num_tokens)
    trainer.begin_cool_down()
    while not (stop.is_set or trainer.is_cooled_down() or _is_over(trainer, limits, started)):
        losses.append(trainer.take_step())
        if trainer.step % _LOG_EVERY_STEPS == 0:
            _return_free_memory()
            _log(trainer, losses, mark)
            losses, mark = [], (trainer.seconds, trainer.num_tokens)
        if time.monotonic() - saved > limits.save_every_seconds:
            trainer.folder.save_state(trainer.state())
            saved = time.monotonic()
    trainer.folder.save_state(trainer.state())


def _return_free_memory() -> None:
    """Return freed memory to the system: batches of different shapes grow the heap from 0.5 to 5 GB in 600 steps."""
    if _LIBC is not None:
        _LIBC.malloc_trim(0)


def _is_over(trainer: Trainer, limits: Limits, started: float) -> bool:
    past_steps = limits.steps is not None and trainer.step >= limits.steps
    return past_steps or (limits.minutes is not None and time.monotonic() - started >= 60 * limits.minutes)


def open_trainer(
    out: Path, settings: TrainingSettings, *, resume: bool = False, start_from: Path | None = None, cool_down: int = 0
) -> Trainer:
    """Begin a run in a new folder, resume the run there, or begin with another run's state."""
    folder = RunFolder(out)
    if folder.has_state and not resume:
        raise SystemExit(f"{out} holds a run already; go on with --resume, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    source = folder if folder.has_state else RunFolder(start_from) if start_from else None
    if source is not None:
        settings = TrainingSettings.from_dict(source.load_settings())
    if not folder.tokenizer_path.exists():
        _make_tokenizer(folder, source)
    folder.save_settings(settings)
    trainer = Trainer(settings, folder, cool_down)
    if source is not None:
        trainer.restore(source.load_state())
    return trainer


def _make_tokenizer(folder: RunFolder, source: RunFolder | None) -> None:
    if source is not None:
        shutil.copyfile(source.tokenizer_path, folder.tokenizer_path)
    else:
        train_tokenizer().save(str(folder.tokenizer_path))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the run's folder")
    parser.add_argument("--steps", type=int, help="stop when the run has this many steps in all")
    parser.add_argument("--minutes", type=float, help="stop after this many minutes of this process")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads to use")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--start-from", type=Path, help="begin with the state of another run")
    parser.add_argument(
        "--cool-down", type=int, default=0, metavar="STEPS", help="lower the learning rate over STEPS, then stop"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=TrainingSettings.peak_learning_rate, help="peak learning rate"
    )
    parser.add_argument("--adamw", action="store_true", help="use AdamW for the matrices too")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=fastest_dtype(), help="dtype of matrix products"
    )
    return parser.parse_args()


def main() -> None:
    """Run the command."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    settings = TrainingSettings(
        peak_learning_rate=arguments.learning_rate, use_muon=not arguments.adamw, dtype=arguments.dtype
    )
    trainer = open_trainer(
        arguments.out, settings, resume=arguments.resume, start_from=arguments.start_from, cool_down=arguments.cool_down
    )
    pid_path = trainer.folder.pid_path
    pid_path.write_text(f"{os.getpid()}\n")
    try:
        train(trainer, Limits(arguments.steps, arguments.minutes))
    finally:
        if pid_path.exists() and pid_path.read_text() == f"{os.getpid()}\n":  # else another process continues already
            pid_path.unlink()


if __name__ == "__main__":
    main()

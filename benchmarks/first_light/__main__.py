"""Measures how long a request takes and where its time goes: disaggregated beside aggregated, in one run.

python -m benchmarks.first_light [--quick] [--json FILE] [--markdown FILE] [--model FOLDER ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lib import arrangements as choices
from benchmarks.lib import report
from benchmarks.lib.arrangements import Workload
from benchmarks.lib.machine import CpuUse, machine_conditions
from benchmarks.lib.measuring import Measured, measure_model
from benchmarks.lib.random_model import made
from benchmarks.lib.stats import Figures, flat
from tandem_engine.demo import MODEL_ID, checkpoint_path

_LARGE_BYTES = 200_000_000
Save = Callable[[Mapping[str, Sequence[Measured]], Mapping[str, str]], None]


@dataclass(frozen=True)
class Subject:
    """One model to measure. `label` names its figures."""

    label: str
    title: str
    folder: Path
    flags: tuple[str, ...]
    workloads: tuple[Workload, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what we started ends with us
    console = Console() if sys.stdout.isatty() else Console(width=150)
    conditions = machine_conditions()
    before = CpuUse.now()

    def save(results: Mapping[str, Sequence[Measured]], labels: Mapping[str, str]) -> None:
        """Write what there is so far: a run that is broken off keeps what it has measured."""
        so_far = {**conditions, "cpu_used_by_others": f"{CpuUse.now().foreign_share_since(before):.1%} so far"}
        _save(options, document(so_far, results, labels), report.markdown(so_far, results))

    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder, _subjects(options, Path(folder)) as subjects:
        conditions["models"] = {subject.title: _numbers(subject.folder) for subject in subjects}
        report.print_conditions(console, conditions)
        asyncio.run(_measure_all(subjects, options.quick, Path(folder), console, save))
    return 0


def document(
    conditions: Mapping[str, Any], results: Mapping[str, Sequence[Measured]], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return what --json writes: the conditions, and flat `model.cN.arrangement.figure: number` pairs."""
    figures: Figures = {}
    for title, measurements in results.items():
        for measured in measurements:
            prefix = f"{labels[title]}.c{measured.workload.concurrency}"
            for name, values in measured.by_arrangement.items():
                figures |= flat(f"{prefix}.{name}", values)
            figures |= flat(prefix, {**measured.ratios, "foreign_cpu_share": measured.foreign_cpu_share})
    return {"conditions": dict(conditions), "figures": figures}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_light", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="built-in model only, few requests: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write conditions and flat figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, as a page")
    parser.add_argument(
        "--model",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="checkpoint folders to measure instead of the built-in model and a random Llama of 0.5 billion parameters",
    )
    return parser


@contextmanager
def _subjects(options: argparse.Namespace, folder: Path) -> Iterator[list[Subject]]:
    """Yield the models to measure; one that is made for the occasion lies in `folder`."""
    if options.model:
        yield [_subject(path.resolve(), options.quick) for path in options.model]
        return
    workloads = choices.QUICK if options.quick else choices.SMALL_MODEL
    demo = Subject("demo", MODEL_ID, checkpoint_path(), (), workloads)
    yield [demo] if options.quick else [demo, _random_llama(folder)]


def _subject(folder: Path, quick: bool) -> Subject:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not size:
        raise SystemExit(f"--model {folder} holds no *.safetensors; name the folder of a checkpoint")
    workloads = choices.QUICK if quick else choices.LARGE_MODEL if size > _LARGE_BYTES else choices.SMALL_MODEL
    return Subject(folder.name, folder.name, folder, ("--model", str(folder)), workloads)


def _random_llama(folder: Path) -> Subject:
    target = made(folder, "0.5b")
    return Subject("llama_0_5b", "random Llama, 0.5 B", target, ("--model", str(target)), choices.LARGE_MODEL)


def _numbers(folder: Path) -> str:
    """Progress what tells one checkpoint from another."""
    config = json.loads((folder / "config.json").read_text())
    shape = {name: config.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size", "dtype")}
    return " ".join(f"{name}={value}" for name, value in shape.items())


async def _measure_all(subjects: Sequence[Subject], quick: bool, folder: Path, console: Console, save: Save) -> None:
    results: dict[str, list[Measured]] = {}
    labels = {subject.title: subject.label for subject in subjects}
    for subject in subjects:
        # A third copy of a large model takes memory that others need.
        only_pair = quick or subject.workloads is choices.LARGE_MODEL
        chosen = choices.arrangements(machine_conditions()["cores"], only_pair=only_pair)
        progress = _progress_printer(console, subject.title)
        place = folder / f"run-{subject.label}"
        place.mkdir()
        measuring = measure_model(subject.folder, subject.flags, chosen, subject.workloads, place, progress)
        async with aclosing(measuring):
            async for measured in measuring:
                report.print_measured(console, subject.title, measured)
                results.setdefault(subject.title, []).append(measured)
                save(results, labels)


def _progress_printer(console: Console, title: str) -> Callable[[str], None]:
    return lambda line: console.print(f"{title}: {line}", style="dim", highlight=False)


def _save(options: argparse.Namespace, saved: Mapping[str, Any], page: str) -> None:
    if options.json:
        options.json.write_text(json.dumps(saved, indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(page + "\n")


if __name__ == "__main__":
    sys.exit(main())

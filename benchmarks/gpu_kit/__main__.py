"""Tries Tandem on a card in one go: limits, parity, speed, hand-over, memory and kill -9. Writes one JSON file.

python -m benchmarks.gpu_kit [--json FILE] [--quick] [--device cuda:0] [--only PART ...]

`make gpu-kit` installs what it needs and runs it. Under ten minutes; nothing is downloaded: the models are the built-in
one and a Llama with random weights. `--device cpu` runs every part in small, to try the kit itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.part import PARTS, Part, Result, Settings
from benchmarks.gpu_kit.runner import run_parts
from benchmarks.gpu_kit.verdict import Bar, bars, headline
from benchmarks.lib.machine import machine_conditions
from benchmarks.lib.served import ROOT

FORMAT = 1
"""Of the JSON file; grows when a reader would misunderstand a newer file."""
_CONDITIONS = ("cpu", "cores", "memory_gib", "system", "python")
_MARKS = {"done": "done", "failed": "FAILED", "left_out": "left out"}
NO_CARD, SOMETHING_WRONG = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the file. Return 0; 1 if a part failed or a bar was missed; 2 without a card."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what we started ends with us
    device = str(options.device)
    environment = {} if device == "cpu" else card_environment(device, os.environ)
    form = "cpu" if device == "cpu" else "quick" if options.quick else "full"
    parts = [part for part in PARTS if not options.only or part.name in (*options.only, "card")]
    began, results = time.time(), dict[str, Result]()

    def report(part: Part, result: Result) -> None:
        """Show a part, and write the file so far: a run that is broken off keeps what it has."""
        results[part.name] = result
        line = f"{_MARKS[result.state]:<8} {result.seconds:6.1f} s  {part.title}: {headline(part.name, result)}"
        print(line, flush=True)
        _write(options.json, document(options, form, began, results))

    with tempfile.TemporaryDirectory(prefix="tandem-gpu-kit-") as folder:
        settings = Settings("cpu" if device == "cpu" else "cuda:0", form, Path(folder))
        asyncio.run(run_parts(parts, settings, environment, 60 * options.minutes, report, has_to_work="card"))
    if results["card"].state != "done":
        print(f"nothing was tried: {results['card'].reason}", file=sys.stderr)
        return NO_CARD if results["card"].reason.startswith("NoCard") else SOMETHING_WRONG
    judged = _judged(form, results)
    for bar in judged:
        print(f"{'met' if bar.is_met else 'MISSED'}: {bar.text}")
    print(f"written: {options.json}")
    has_failed = any(result.state == "failed" for result in results.values())
    return SOMETHING_WRONG if has_failed or any(not bar.is_met for bar in judged) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json", type=Path, default=Path("gpu_kit.json"), metavar="FILE", help="write the results there"
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer turns; judges no bar")
    parser.add_argument("--device", type=_device, default="cuda:0", help="cuda:N, or cpu to try the kit itself")
    parser.add_argument("--minutes", type=float, default=10.0, help="parts that do not begin within them are left out")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="PART", help=", ".join(names))
    return parser


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be cpu, cuda or cuda:N")
    return text


def card_environment(device: str, surroundings: Mapping[str, str]) -> dict[str, str]:
    """Return variables that leave one card visible, as cuda:0, to every process of the kit.

    The order of cards is that of nvidia-smi, unless CUDA_DEVICE_ORDER says otherwise. Within CUDA_VISIBLE_DEVICES, N
    counts its entries. Raises SystemExit for a number beyond them.
    """
    index, chosen = int(device.partition(":")[2] or 0), device.partition(":")[2] or "0"
    if (visible := surroundings.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]
        if index >= len(names):
            raise SystemExit(f"--device {device}: CUDA_VISIBLE_DEVICES has {len(names)} entries; the first is cuda:0")
        chosen = names[index]  # "": all cards are hidden
    return {"CUDA_DEVICE_ORDER": surroundings.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), "CUDA_VISIBLE_DEVICES": chosen}


def document(options: argparse.Namespace, form: str, began: float, results: Mapping[str, Result]) -> dict[str, Any]:
    """Return all that the file holds."""
    conditions = machine_conditions()
    return {
        "kit": FORMAT,
        "version": version("tandem-serve"),
        "commit": _commit(),
        "command": " ".join(["python -m benchmarks.gpu_kit", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
        "seconds": time.time() - began,
        "device": options.device,
        "form": form,
        "machine": {name: conditions[name] for name in _CONDITIONS},
        "parts": {name: asdict(result) for name, result in results.items()},
        "bars": [asdict(bar) for bar in _judged(form, results)],
    }


def _judged(form: str, results: Mapping[str, Result]) -> list[Bar]:
    """Judge a full run; parts that were not asked for have no bars."""
    return [bar for bar in bars(results) if bar.part in results] if form == "full" else []


def _commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it; "" where git does not tell."""
    try:
        said = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said[0] + ("+" if said[1] else "")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

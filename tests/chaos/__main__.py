"""Runs chaos: `python -m tests.chaos --minutes 15 --streams 500`, or --short; --seed N repeats a run."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tandem_runtime import loop_turns
from tests.chaos.options import Options, short
from tests.chaos.runner import Run
from tests.chaos.surroundings import folder_inside, start_again_inside


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill, stop and restart the processes of a fleet while it is asked.")
    parser.add_argument("--minutes", type=float, help="how long faults go on, at least; 15 unless record")
    parser.add_argument("--streams", type=int, help="how many streams there are, at least; 500 unless record")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="what all is drawn from")
    parser.add_argument("--short", action="store_true", help="the form of `make test`, half a minute")
    parser.add_argument(
        "--certificate-seconds", type=float, help="how long certificates are valid, at least 10; 0: plain text"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    asked = parser.parse_args()
    options = short(asked.seed) if asked.short else Options(asked.seed)
    if asked.minutes is not None:
        options = replace(options, seconds=asked.minutes * 60)
    if asked.streams is not None:
        options = replace(options, num_streams=asked.streams)
    if asked.certificate_seconds is not None:
        options = replace(options, certificate_seconds=asked.certificate_seconds)
    folder = folder_inside()
    if folder is None:
        print(f"seed {options.seed}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
        start_again_inside(folder, [*sys.argv[1:], "--seed", str(options.seed)])
    torch.set_num_threads(1)
    run = Run(options, folder)
    verdict = loop_turns.run(run.run())
    print("\n".join(verdict.lines()), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(verdict.as_json(), indent=1))
    return 0 if verdict.holds else 1


if __name__ == "__main__":
    sys.exit(main())

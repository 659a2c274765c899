"""Tests that a token depends only on its request: `python -m tests.tandem_engine.determinism --requests 1000`."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.tandem_engine.determinism.stage import LEFT_OUT, MODELS
from tests.tandem_engine.determinism.verdict import judge, table, totals


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer the same random requests in every way; compare all bits.")
    parser.add_argument(
        "--requests", type=int, default=1000, help="requests per way, all models together; default 1000"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="seed of all random numbers")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    print(f"seed {args.seed}; left out, batch-dependent: {', '.join(LEFT_OUT)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tandem-determinism-") as folder:
        lines = judge(args.models, args.requests, args.seed, Path(folder), lambda line: print(line, flush=True))
    summed = totals(lines)
    print("\n".join(table(summed)), flush=True)
    if args.json:
        by_model = {name: [asdict(line) for line in of_model.values()] for name, of_model in lines.items()}
        figures = {"seed": args.seed, "ways": [asdict(line) for line in summed], "models": by_model}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(line.holds for line in summed) else 1


if __name__ == "__main__":
    sys.exit(main())

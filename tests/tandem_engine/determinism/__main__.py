"""Does a token depend on its request alone? `python -m tests.tandem_engine.determinism --requests 1000 --json FILE`"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.tandem_engine.determinism.stage import MODELS
from tests.tandem_engine.determinism.verdict import judge, table, totals


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer the same random requests in every way and compare all bits.")
    parser.add_argument("--requests", type=int, default=1000, help="to each way, all models together; 1000 unless told")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="what all is drawn from")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="all unless told")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tandem-determinism-") as folder:
        lines = judge(asked.models, asked.requests, asked.seed, Path(folder), lambda line: print(line, flush=True))
    summed = totals(lines)
    print("\n".join(table(summed)), flush=True)
    if asked.json:
        by_model = {name: [asdict(line) for line in of_model.values()] for name, of_model in lines.items()}
        figures = {"seed": asked.seed, "ways": [asdict(line) for line in summed], "models": by_model}
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(line.holds for line in summed) else 1


if __name__ == "__main__":
    sys.exit(main())

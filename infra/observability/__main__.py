"""Writes dashboards, rules and Prometheus' configuration: `python -m infra.observability`.

`--check` writes nothing, names the files that are stale, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys

from infra.observability.files import ROOT, files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is stale")
    is_check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if is_check:
            print(f"{path.relative_to(ROOT)} is stale; run python -m infra.observability", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path])
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

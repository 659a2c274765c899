"""`make install-test`: installs Tandem in each way from nothing, with the seconds of each step.

python -m tests.install [wheel|images|compose|kubernetes|systemd ...]      exit code 0 all held, 1 some did not

Without a name all ways are tried, one after the other. A way whose tools this machine lacks ends with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence

WAYS = ("wheel", "images", "compose", "kubernetes", "systemd")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the named ways, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.install", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; all if none is named")
    ways = parser.parse_args(arguments).ways or WAYS
    if unknown := sorted(set(ways) - set(WAYS)):
        parser.error(f"no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    failed = [way for way in ways if _run(way) != 0]
    print(f"failed: {', '.join(failed)}" if failed else f"all held: {', '.join(ways)}")
    return int(bool(failed))


def _run(way: str) -> int:
    """Run a way's module, which needs nothing of the others'."""
    print(f"== {way}", flush=True)
    started = time.monotonic()
    code: int = importlib.import_module(f"tests.install.{way}").main()
    print(f"== {way}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())

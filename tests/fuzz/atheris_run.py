"""Fuzzes one parser with atheris, which coverage guides: `python -m tests.fuzz.atheris_run NAME [libFuzzer options]`.

A process of its own for each parser: libFuzzer ends its process.
"""

from __future__ import annotations

import sys

import atheris

from tandem_runtime import log
from tests.fuzz.names import MODULES


def main() -> None:
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=list(MODULES[name])):
        from tests.fuzz.parsers import PARSERS

    log.configure("tandem-fuzz", level="critical")
    parser = PARSERS[name]
    atheris.Setup(sys.argv, parser.feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

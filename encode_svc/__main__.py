"""Runs an encode worker: `python -m encode_svc`. `--help` lists the settings."""

from __future__ import annotations

import sys

from encode_svc.process import EncodeWorker
from encode_svc.settings import EncodeSettings
from tandem_runtime.settings import load_settings


def main() -> int:
    return EncodeWorker(load_settings(EncodeSettings, "encode")).run()


if __name__ == "__main__":
    sys.exit(main())

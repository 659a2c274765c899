"""Runs a decode worker: `python -m decode_svc`. `--help` lists the settings."""

from __future__ import annotations

import sys

from decode_svc.kv_consumer import KVConsumer
from tandem.v1 import types_pb2 as pb
from tandem_runtime.settings import load_settings
from tandem_worker import process
from tandem_worker.settings import WorkerSettings


def main() -> int:
    return process.main(load_settings(WorkerSettings, "decode"), pb.WORKER_ROLE_DECODE, KVConsumer)


if __name__ == "__main__":
    sys.exit(main())

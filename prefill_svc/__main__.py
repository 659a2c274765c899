"""Runs a prefill worker: `python -m prefill_svc`. `--help` lists the settings."""

from __future__ import annotations

import sys

from prefill_svc.kv_producer import KVProducer
from tandem.v1 import types_pb2 as pb
from tandem_runtime.settings import load_settings
from tandem_worker import process
from tandem_worker.settings import WorkerSettings


def main() -> int:
    return process.main(load_settings(WorkerSettings, "prefill"), pb.WORKER_ROLE_PREFILL, KVProducer)


if __name__ == "__main__":
    sys.exit(main())

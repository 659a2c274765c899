"""`python -m decode_svc`: run a decode worker; see --help."""

from __future__ import annotations

import sys

from decode_svc.kv_consumer import DecodeHandOver
from tandem.v1 import decode_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.settings import load_settings
from tandem_worker import process
from tandem_worker.settings import WorkerSettings


class DecodeService(process.WorkerService, decode_pb2_grpc.DecodeServiceServicer):
    """tandem.v1.DecodeService, as every worker serves it."""


def main() -> int:
    return process.main(
        load_settings(WorkerSettings, "decode"),
        pb.WORKER_ROLE_DECODE,
        "tandem.v1.DecodeService",
        DecodeHandOver,
        DecodeService,
        decode_pb2_grpc.add_DecodeServiceServicer_to_server,
    )


if __name__ == "__main__":
    sys.exit(main())

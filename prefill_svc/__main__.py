"""`python -m prefill_svc`: run a prefill worker; see --help."""

from __future__ import annotations

import sys

from prefill_svc.kv_producer import PrefillHandOver
from tandem.v1 import prefill_pb2_grpc
from tandem.v1 import types_pb2 as pb
from tandem_runtime.settings import load_settings
from tandem_worker import process
from tandem_worker.settings import WorkerSettings


class PrefillService(process.WorkerService, prefill_pb2_grpc.PrefillServiceServicer):
    """tandem.v1.PrefillService, as every worker serves it."""


def main() -> int:
    return process.main(
        load_settings(WorkerSettings, "prefill"),
        pb.WORKER_ROLE_PREFILL,
        "tandem.v1.PrefillService",
        PrefillHandOver,
        PrefillService,
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
    )


if __name__ == "__main__":
    sys.exit(main())

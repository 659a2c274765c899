"""`python -m kv_transfer_svc`: runs the KV service of a host; see --help."""

from __future__ import annotations

import asyncio
import sys

from kv_transfer_svc.process import KvProcess
from kv_transfer_svc.settings import KvSettings
from tandem_runtime import lifecycle, log, metrics, tracing
from tandem_runtime.enrolment.membership import StoppedEarly
from tandem_runtime.settings import load_settings


def main() -> int:
    settings = load_settings(KvSettings, "kv")
    log.configure("tandem-kv", settings.log_json)
    tracing.configure("tandem-kv", settings.otlp_endpoint or None)
    metrics.configure("tandem-kv", settings.otlp_endpoint or None)

    async def serve(drain: asyncio.Event) -> int:
        try:
            process = await KvProcess.create(settings, drain)
        except StoppedEarly:
            return 0
        return await process.run(drain)

    return lifecycle.run(serve, settings.loop_stall_seconds)


if __name__ == "__main__":
    sys.exit(main())

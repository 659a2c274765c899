"""Asks one process of this machine for its health, and exits with 0 or 1: for exec probes, such as Kubernetes'.

    python -m tandem_runtime.health_check 127.0.0.1:8651 --certificate STATE_DIR/certificates/decode

With certificates nobody answers a gRPC probe that shows none. This probe shows the certificate of the process itself,
and takes an answer of no other one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem_runtime.certificates.credentials import ProcessCertificate
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import TandemError, Unavailable


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the process is healthy; else print why not, and return 1."""
    flags = _parser().parse_args(argv)
    try:
        asyncio.run(_check(flags.address, flags.certificate, flags.seconds, is_alive_enough=flags.alive))
    except (TandemError, OSError, ValueError) as error:
        print(f"{flags.address}: {error}", file=sys.stderr)
        return 1
    return 0


async def _check(address: str, folder: Path | None, seconds: float, *, is_alive_enough: bool) -> None:
    """Raise TandemError, OSError or ValueError unless the process is healthy."""
    member = FleetMember(ProcessCertificate.in_folder(folder)) if folder is not None else None
    async with open_channel(address, member, member.identity if member is not None else None) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        reply: health_pb2.HealthCheckResponse = await check(health_pb2.HealthCheckRequest(), timeout=seconds)
    if reply.status != health_pb2.HealthCheckResponse.SERVING and not is_alive_enough:
        raise Unavailable("it answers, and does not serve: it loads its model, drains, or is not registered")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_runtime.health_check", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("address", help="gRPC address of the process: host:port, as in its --listen")
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FOLDER",
        help="folder of the process's certificate: certificates/<role> in its state directory, or "
        "certificates/<worker id> if it has --worker-id; without it, in plain text",
    )
    parser.add_argument(
        "--alive", action="store_true", help="any answer will do, also of a process that loads or drains"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds to wait for the answer [default: 5]")
    return parser


if __name__ == "__main__":
    sys.exit(main())

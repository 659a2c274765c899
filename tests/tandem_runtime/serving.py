"""Runs a gRPC server of one service for a block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.server import GrpcServer


@asynccontextmanager
async def serving(
    register: Callable[[grpc.aio.Server], None], service: str, member: FleetMember | None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """Serve `service` (such as "tandem.v1.WorkerService"), which `register` adds; yield the address."""
    server = GrpcServer(listen, register, [service], member=member)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)

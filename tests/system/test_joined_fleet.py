"""Four processes started by hand, without any setting of certificates, are one fleet that answers nobody else.

The tests share the fleet, in this order: strangers, a restart, a revocation, a clock that jumps by 26 hours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem_runtime.certificates.files import read_certificate
from tandem_runtime.channel import open_channel
from tandem_runtime.enrolment.membership import EXIT_REFUSED
from tandem_runtime.errors import Unavailable
from tests.ports import free_ports
from tests.system.conftest import SMALL
from tests.system.fleet import until
from tests.system.machine import Machine
from tests.system.wall_clock import WallClock, has_compiler, require_compiler

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOURS = 26.0
SERVING_AGAIN_SECONDS = 10.0
_WORKERS = {"decode-0", "kv-0", "prefill-0"}


class _Fleet:
    """The services of one machine, with one state directory and one clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = WallClock(folder) if has_compiler() else None
        self.machine = Machine(folder, **(self.clock.environment if self.clock is not None else {}))
        self._http_port, self.grpc_port, self._enrolment_port = free_ports(3)
        self._control = ("--control", f"127.0.0.1:{self.grpc_port}")
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._http_port}", timeout=60, trust_env=False)

    def start_gateway(self) -> None:
        self.machine.start(
            "control_plane",
            *("--listen", f"127.0.0.1:{self._http_port}", "--grpc-listen", f"127.0.0.1:{self.grpc_port}"),
            *("--enrolment-listen", f"127.0.0.1:{self._enrolment_port}", "--local-prefill", "never"),
        )

    def start(self, module: str, name: str, *flags: str) -> None:
        self.machine.start(module, *self._control, "--worker-id", name, *flags, name=name)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return the workers that get requests, by name."""
        try:
            found = (await self.http.get("/v1/workers")).json()["data"]
        except httpx.TransportError:
            return {}
        return {each["name"]: each for each in found if each["state"] == "ready" and not each["suspected"]}

    async def has(self, name: str) -> bool:
        return name in await self.workers()

    async def answers(self) -> bool:
        ask = {"model": "@tandem/demo", "prompt": f"{time.time()} What is a KV cache? " * 10, "max_tokens": 8}
        return (await self.http.post("/v1/completions", json=ask)).status_code == 200

    def expiries(self) -> list[float]:
        """Return when the certificates of the gateway and of its workers expire, in Unix seconds."""
        folders = [self.machine.state_dir / "certificates" / name for name in ("gateway", *_WORKERS)]
        found = [x509.load_pem_x509_certificate(read_certificate(folder).certificate) for folder in folders]
        return [certificate.not_valid_after_utc.timestamp() for certificate in found]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[_Fleet]:
    fleet = _Fleet(tmp_path_factory.mktemp("joined"))
    try:
        fleet.start("decode_svc", "decode-0", *SMALL)  # in any order
        fleet.start("kv_transfer_svc", "kv-0")
        fleet.start("prefill_svc", "prefill-0", *SMALL)
        fleet.start_gateway()

        async def serves() -> bool:
            has_all = set(await fleet.workers()) == _WORKERS and await fleet.answers()
            return has_all and (await fleet.http.get("/readyz")).is_success  # after a prompt that prefill computed

        await until(serves, 90, fleet.machine.end_of_log)
        yield fleet
    finally:
        await fleet.http.aclose()
        await fleet.machine.stop()


async def test_a_fleet_started_by_hand_has_certificates_and_answers_nobody_without(fleet: _Fleet) -> None:
    found = await fleet.workers()
    for address in [f"127.0.0.1:{fleet.grpc_port}", *(worker["address"] for worker in found.values())]:
        async with open_channel(address) as plain:
            with pytest.raises(Unavailable):
                await health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest(), timeout=10)


async def test_a_process_that_starts_again_is_the_same_member(fleet: _Fleet) -> None:
    before = (await fleet.workers())["kv-0"]
    assert before["id"] != "kv-0"
    await fleet.machine.stop("kv-0")
    fleet.start("kv_transfer_svc", "kv-0")

    async def is_back() -> bool:
        again = (await fleet.workers()).get("kv-0")
        return again is not None and again["id"] == before["id"] and again["incarnation"] != before["incarnation"]

    await until(is_back, 60, fleet.machine.end_of_log)


async def test_who_is_revoked_is_out_and_ends_since_a_restart_would_not_help(fleet: _Fleet) -> None:
    fleet.start("kv_transfer_svc", "kv-1", "--host-id", "another")
    await until(lambda: fleet.has("kv-1"), 30, fleet.machine.end_of_log)
    revoked = fleet.machine.running.pop("kv-1")
    await fleet.machine.call("control_plane", "fleet", "revoke", (await fleet.workers())["kv-1"]["id"])

    async def is_out() -> bool:
        return not await fleet.has("kv-1")

    await until(is_out, 30, fleet.machine.end_of_log)
    assert await asyncio.to_thread(revoked.wait, 60) == EXIT_REFUSED
    assert "certificate_refused" in fleet.machine.log()


@pytest.mark.services
async def test_after_26_hours_asleep_all_certificates_are_renewed_and_requests_answered(fleet: _Fleet) -> None:
    require_compiler()
    assert fleet.clock is not None, "it is installed"
    # 1. All four certificates have expired at once, those of the gateway too.
    fleet.clock.jump(HOURS)
    jumped = time.monotonic()
    now = time.time() + HOURS * 3600
    assert max(fleet.expiries()) < now

    async def serves_again() -> bool:
        return min(fleet.expiries()) > now and set(await fleet.workers()) == _WORKERS and await fleet.answers()

    await until(serves_again, SERVING_AGAIN_SECONDS, fleet.machine.end_of_log)
    print(f"serving again {time.monotonic() - jumped:.1f} s after the jump")

    # 2. The join tokens of this machine have expired too: new ones let another process in.
    fleet.start("kv_transfer_svc", "kv-2", "--host-id", "a third")
    await until(lambda: fleet.has("kv-2"), 30, fleet.machine.end_of_log)

"""A fleet on a machine with a shared GPU and a GPU in MIG mode, whose driver hangs at times.

NVML is the stub. It aborts a worker that calls it on the thread of its event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.scrape import Scrape
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import client, stream, text_of
from tests.tandem_runtime.test_memory import GIB, MIG_B, UUID_B, stub_folder

SHARED = {"CUDA_VISIBLE_DEVICES": "1"}
INSTANCE = {"CUDA_VISIBLE_DEVICES": MIG_B}


class Machine:
    """What the driver says of this machine's GPUs: 0 is in MIG mode, 1 is whole."""

    def __init__(self, folder: Path) -> None:
        self._scene = folder / "scene"
        self._folder = folder

    def environment(self, devices: dict[str, str]) -> dict[str, str]:
        ours = {"LD_LIBRARY_PATH": str(stub_folder()), "TANDEM_RUNTIME_DIR": str(self._folder / "run")}
        stub = {"NVML_STUB_MIG": "1", "NVML_STUB_THREADS": "1", "NVML_STUB_SCENE": str(self._scene)}
        return {**ours, **stub, **devices}

    def says(self, *lines: str) -> None:
        new = self._scene.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._scene)


@asynccontextmanager
async def three_workers(folder: Path) -> AsyncIterator[tuple[Fleet, Machine, httpx.AsyncClient]]:
    """Prefill and one decode worker on GPU 1, the other decode worker in an instance of GPU 0."""
    machine = Machine(folder)
    machine.says("hang")
    async with Fleet(folder) as fleet:
        fleet.start("kv", "kv-0", env=machine.environment({}))
        fleet.start("prefill", "prefill-0", *SMALL, env=machine.environment(SHARED))
        fleet.start("decode", "decode-0", *SMALL, env=machine.environment(SHARED))
        fleet.start("decode", "decode-1", *SMALL, env=machine.environment(INSTANCE))
        async with client(fleet.base_url) as http:
            yield fleet, machine, http


def engine_pid(fleet: Fleet, name: str) -> int:
    front = psutil.Process(fleet.services[name].process.pid)
    [engine] = [each for each in front.children() if "tandem_engine.process" in each.cmdline()]
    return engine.pid


async def memory(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Return the memory report of each worker, by name, as any client gets it."""
    return {row["name"]: row["memory"] for row in (await http.get("/v1/workers")).json()["data"]}


async def test_workers_start_serve_and_report_whatever_the_driver_does(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as (fleet, machine, http):
        # 1. The driver hangs from the start: the workers get ready, and say so.
        await fleet.ready()
        workers = [name for name in fleet.services if name != "kv-0"]

        async def is_silent() -> bool:
            found = await memory(http)
            return all(found[name]["source"].startswith("host: NVML has not answered for") for name in workers)

        await until(is_silent, 30)
        assert text_of(await stream(http, {"prompt": "What is a KV cache?", "max_tokens": 8}))

        # 2. It answers: each worker has its own memory, and no other worker of Tandem is foreign to it.
        prefill, decode, in_instance = (engine_pid(fleet, name) for name in workers)
        machine.says(
            *(f"process 1 {prefill} 3072", f"process 1 {decode} 5120", "process 1 999999 1024", "used 1 9728"),
            f"process 0/4/0 {in_instance} 2048",
        )

        def owned(report: dict[str, Any]) -> tuple[Any, ...]:
            [device] = report["devices"] or [{}]
            return tuple(device.get(name) for name in ("uuid", "mig_instance", "own_bytes", "foreign_bytes"))

        async def is_told_apart() -> bool:
            found = await memory(http)
            return (
                owned(found["prefill-0"]) == (UUID_B, "", 3 * GIB, GIB)
                and owned(found["decode-0"]) == (UUID_B, "", 5 * GIB, GIB)
                and owned(found["decode-1"]) == (MIG_B, "4/0", 2 * GIB, 0)
            )

        await until(is_told_apart, 30)
        found = await memory(http)
        assert found["decode-1"]["devices"][0]["utilization_percent"] is None, "NVML does not tell it of an instance"
        assert found["prefill-0"]["devices"][0]["utilization_percent"] == 0
        assert (found["kv-0"]["devices"], found["kv-0"]["source"]) == ([], "host: this process uses no device")

        # 3. It hangs again: heartbeats and answers go on, and the figures have their age.
        machine.says("hang")

        async def has_an_age() -> bool:
            devices = [(await memory(http))[name]["devices"][0] for name in workers]
            return all("NVML has not answered for" in device["error"] for device in devices)

        await until(has_an_age, 30)
        assert text_of(await stream(http, {"prompt": "What is a KV cache?", "max_tokens": 8}))
        assert all(worker is not None and not worker.is_suspected for worker in map(fleet.worker, workers))
        exported = await scrape(fleet, "decode-0")
        assert exported.value("tandem_device_silence_seconds") >= 3
        assert exported.series("tandem_device_memory_bytes") == []

        # 4. A killed worker is forgotten: what still holds its memory is foreign.
        fleet.services["decode-0"].kill()
        machine.says(f"process 1 {prefill} 3072", "process 1 888888 5120", "used 1 8704")

        async def is_foreign() -> bool:
            return owned((await memory(http))["prefill-0"])[2:] == (3 * GIB, 5 * GIB)

        await until(is_foreign, 30)


async def scrape(fleet: Fleet, name: str) -> Scrape:
    worker = fleet.worker(name)
    assert worker is not None, f"{name} is not registered"
    async with httpx.AsyncClient(trust_env=False) as http:
        return Scrape((await http.get(f"http://{worker.info.metrics_address}/metrics")).content)

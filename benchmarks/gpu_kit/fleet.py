"""Starts a whole Tandem with one prefill and one decode worker, and reads what its workers report and hold."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.gpu_kit.part import MissingFlag, Settings
from benchmarks.lib import random_model
from benchmarks.lib.later_report import LaterReport
from benchmarks.lib.served import Served
from benchmarks.long_prompts.asking import Answer, ask
from benchmarks.peers.protocol import prompt_ids
from tandem_worker.settings import WorkerSettings

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 15.0
_LEASE_SECONDS = 3.0
_STATUS_FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmHWM")
_DAY_SECONDS = 86400
_FOLDERS = "fleet-"

Row = dict[str, Any]
"""A worker or KV service, as `GET /v1/workers` describes it."""


def prefill_flags(**settings: object) -> dict[str, str]:
    """Return settings of the prefill worker as variables; raises MissingFlag for one that this checkout lacks."""
    known = WorkerSettings.__dataclass_fields__
    if unknown := sorted(settings.keys() - set(known)):
        flags = ", ".join("--" + name.replace("_", "-") for name in unknown)
        raise MissingFlag(f"the prefill worker of this checkout does not know {flags}")
    return {f"TANDEM_PREFILL_{name.upper()}": str(value) for name, value in settings.items()}


def newest_log(folder: Path) -> Path | None:
    """Return the log of the `tandem up` that was started last."""
    logs = sorted(folder.glob(f"{_FOLDERS}*/*.log"), key=lambda log: log.stat().st_mtime)
    return logs[-1] if logs else None


def has_flags(*names: str) -> bool:
    """Return whether the workers of this checkout have these settings."""
    return all(name in WorkerSettings.__dataclass_fields__ for name in names)


class Fleet:
    """`tandem up` with the random Llama: `await Fleet.start(...)`, and `close`."""

    def __init__(self, settings: Settings, served: Served, http: httpx.AsyncClient, opened: AsyncExitStack) -> None:
        self.settings = settings
        self._served = served
        self._http = http
        self._opened = opened

    @classmethod
    async def start(cls, settings: Settings, more: Mapping[str, str]) -> Fleet:
        """Start it in a folder of its own; `more` are variables beside those that all fleets of the kit have."""
        folder = settings.folder / f"{_FOLDERS}{secrets.token_hex(4)}"
        model = random_model.made(settings.folder, settings.form.shape)
        async with AsyncExitStack() as opening:
            environment = {**_environment(settings), **more}
            served = Served(folder, ("--model", str(model)), environment, ("prefill", "decode", "kv"))
            await opening.enter_async_context(served)
            http = httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=120.0)
            await opening.enter_async_context(http)
            return cls(settings, served, http, opening.pop_all())
        raise AssertionError("the block above returns or raises")

    async def close(self) -> None:
        await self._opened.aclose()

    @property
    def model(self) -> Path:
        return random_model.made(self.settings.folder, self.settings.form.shape)

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """Return prompts of random tokens that share no beginning with those of another seed."""
        form = self.settings.form
        vocab_size = random_model.SHAPES[form.shape]["vocab_size"]
        return [prompt_ids(form.served_prompt_tokens, vocab_size, seed * 1000 + number) for number in range(count)]

    async def ask(self, prompt: list[int], num_tokens: int) -> Answer:
        """Stream a greedy answer; raises RuntimeError for one that is not complete."""
        return await ask(self._http, self._served.model, prompt, num_tokens)

    async def ask_all(self, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
        """Ask all at once."""
        return list(await asyncio.gather(*(self.ask(prompt, num_tokens) for prompt in prompts)))

    async def row(self, role: str) -> Row:
        """Return what the service of a role has reported of the time after this call."""
        report = LaterReport()
        found: Row = await self.until(
            lambda rows: next(
                (row for row in rows if row["role"] == role and row["state"] == "ready" and report.is_in(row)), None
            ),
            f"the {role} service reports",
            _REPORT_SECONDS,
        )
        return found

    async def until(self, found: Callable[[list[Row]], Any], what: str, seconds: float) -> Any:
        """Return what `found` finds in the rows of all services, once it is true; raises RuntimeError if too late."""
        deadline = time.monotonic() + seconds
        while not (result := found(await self.rows())):
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {seconds:g} s in vain until {what}")
            await asyncio.sleep(_POLL_SECONDS)
        return result

    async def rows(self) -> list[Row]:
        rows: list[Row] = (await self._http.get("/v1/workers")).json()["data"]
        return rows

    def front(self, role: str) -> psutil.Process:
        """Return the process of a worker's front; its child is the engine."""
        for process in psutil.Process().children(recursive=True):
            if f"{role}_svc" in process.cmdline():
                return process
        raise RuntimeError(f"there is no process of {role}_svc")

    def memory(self, role: str) -> dict[str, int]:
        """Return the resident bytes of a worker's front and engine together, by kind."""
        front = self.front(role)
        total = dict.fromkeys(_STATUS_FIELDS, 0)
        for process in (front, *front.children(recursive=True)):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in total:
                    total[name] += int(value.split()[0]) * 1024
        return total


def _environment(settings: Settings) -> dict[str, str]:
    form = settings.form
    environment = {
        "TANDEM_CONTROL_LOCAL_PREFILL": "never",
        "TANDEM_CONTROL_PROBE_INTERVAL_SECONDS": str(_DAY_SECONDS),
        "TANDEM_CONTROL_PROBE_VALID_SECONDS": str(2 * _DAY_SECONDS),
        "TANDEM_DECODE_SPECULATION": "off",  # random weights repeat themselves, which no model does
        "TANDEM_PREFILL_LEASE_SECONDS": str(_LEASE_SECONDS),
        "TANDEM_DECODE_LEASE_SECONDS": str(_LEASE_SECONDS),
    }
    for role in ("PREFILL", "DECODE"):
        environment[f"TANDEM_{role}_DEVICE"] = settings.device
        if form.pool_bytes is not None:
            environment[f"TANDEM_{role}_KV_MEMORY_BYTES"] = str(form.pool_bytes)
    return environment

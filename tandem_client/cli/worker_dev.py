"""What does `tandem worker dev` do: build, run, watch, build again, until Ctrl-C?"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from watchfiles import Change, DefaultFilter, awatch

from tandem_client.cli import worker_capnp
from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig, read_config
from tandem_client.cli.worker_modules import modules_of
from tandem_client.cli.worker_process import Workerd, WorkerdEnded, find_workerd
from tandem_client.wire import is_loopback

Say = Callable[[str], None]
Changes = set[tuple[Change, str]]


@dataclass(frozen=True)
class DevOptions:
    """What the user asked of `tandem worker dev`."""

    folder: Path
    upstream: Upstream
    port: int = 8787
    """0: a free one."""
    environment: str | None = None
    ignore_unsupported: bool = False


class WorkerDev:
    """One Worker under development: workerd runs what its folder holds, and is started anew when that changes."""

    def __init__(self, options: DevOptions, workerd: Path, folder: Path, say: Say) -> None:
        """`folder` is where configurations are written, its owner's alone."""
        self._options = options
        self._workerd_path = workerd
        self._folder = folder
        self._say = say
        self._num_builds = 0
        self._workerd: Workerd | None = None
        self._port = options.port
        self._ignored: tuple[str, ...] = ()

    async def run(self, stop: asyncio.Event) -> None:
        """Run it until `stop`; raises ConfigUnusable or WorkerdEnded if it cannot even start, or ends by itself."""
        changes = awatch(self._options.folder, watch_filter=_Sources(), stop_event=stop, debounce=100, step=20)
        # Watched before it is built: no change comes in between unseen.
        next_change = asyncio.ensure_future(anext(changes, None))
        await asyncio.sleep(0)  # lets it begin
        try:
            await self._restart(await self._build())
            self._say(f"{self._options.folder} listens on {self.url} (env.AI: {self._options.upstream.url})")
            while not stop.is_set() and (found := await self._until(next_change)) is not None:
                next_change = asyncio.ensure_future(anext(changes, None))
                await self._reload(found)
        finally:
            stop.set()
            await asyncio.gather(next_change, return_exceptions=True)
            if self._workerd is not None:
                await self._workerd.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _until(self, next_change: asyncio.Future[Changes | None]) -> Changes | None:
        """Return the next change, None at the end; raises WorkerdEnded if workerd ends before it."""
        if self._workerd is None:
            return await next_change
        ended = asyncio.ensure_future(self._workerd.ended())
        try:
            either: set[asyncio.Future[Any]] = {next_change, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not next_change.done():
                raise WorkerdEnded(f"workerd ended by itself, with exit code {ended.result()}")
            return next_change.result()
        finally:
            ended.cancel()

    async def _reload(self, changes: Changes) -> None:
        names = sorted({str(Path(path).relative_to(self._options.folder)) for _, path in changes})
        try:
            await self._restart(await self._build())
        except ConfigUnusable as error:
            still = "what ran before goes on" if self._workerd else "nothing runs"
            self._say(f"{error}\n{still}; the next change is tried")
        except WorkerdEnded as error:
            self._say(f"{error}\nnothing runs; the next change is tried")
        else:
            self._say(f"reloaded after a change of {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")

    async def _build(self) -> Path:
        """Write workerd's configuration and return its path."""
        return await asyncio.to_thread(self._write)

    def _write(self) -> Path:
        options = self._options
        config = read_config(options.folder, options.environment, ignore_unsupported=options.ignore_unsupported)
        modules = [] if config.main is None else modules_of(config)
        self._num_builds += 1
        folder = self._folder / str(self._num_builds)
        folder.mkdir()
        self._tell_ignored(config)
        return worker_capnp.write(folder, config, modules, options.upstream)

    def _tell_ignored(self, config: WorkerConfig) -> None:
        if config.ignored != self._ignored:
            self._ignored = config.ignored
            self._say(f"goes on without {', '.join(config.ignored) or 'nothing'}")

    async def _restart(self, config: Path) -> None:
        before, self._workerd = self._workerd, None
        if before is not None:
            await before.stop()
        self._workerd = await Workerd.start(self._workerd_path, config, self._port)
        self._port = self._workerd.port


class _Sources(DefaultFilter):
    """Not what tools write beside the sources."""

    ignore_dirs = (*DefaultFilter.ignore_dirs, ".wrangler")


async def dev(options: DevOptions, say: Say) -> None:
    """Run a Worker until a signal ends it; raises ConfigUnusable or WorkerdEnded."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    workerd = find_workerd(options.folder)
    await _look_for(options.upstream, say)
    with tempfile.TemporaryDirectory(prefix="tandem-worker-") as folder:
        await WorkerDev(options, workerd, Path(folder), say).run(stop)


async def _look_for(upstream: Upstream, say: Say) -> None:
    """Say so where nothing answers; the Worker itself may run without it for now."""
    async with httpx.AsyncClient(base_url=upstream.url, trust_env=not is_loopback(upstream.url), timeout=2.0) as client:
        with contextlib.suppress(httpx.TimeoutException):
            try:
                await client.get("/healthz")
            except httpx.TransportError:
                say(f"nothing answers at {upstream.url} yet: start Tandem with `tandem up`, or say --gateway URL")

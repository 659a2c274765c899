"""What does `tandem worker dev` do: build, run, watch, build again, until Ctrl-C?"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from watchfiles import Change, DefaultFilter, awatch

from tandem_client.cli import worker_capnp
from tandem_client.cli.worker_bundle import modules_of
from tandem_client.cli.worker_capnp import Upstream
from tandem_client.cli.worker_config import ConfigUnusable, WorkerConfig, read_config
from tandem_client.cli.worker_process import Workerd, WorkerdEnded, find_workerd, listen, newest_date
from tandem_client.cli.worker_source_map import SourceMap
from tandem_client.cli.worker_view import View

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


@dataclass(frozen=True)
class _Build:
    """A Worker as it is to run: what was read, and workerd's configuration of it."""

    config: WorkerConfig
    path: Path
    digest: bytes
    """Of all that workerd reads: two builds that are alike have the same."""
    source_map: SourceMap | None

    def located(self, line: str) -> str:
        """Return a line that workerd wrote with the places in the Worker's own sources."""
        return self.source_map.located(line) if self.source_map else line


class WorkerDev:
    """One Worker under development: workerd runs what its folder holds, and another one does when that changes."""

    def __init__(self, options: DevOptions, workerd: Path, listener: socket.socket, folder: Path, view: View) -> None:
        """`folder` is where configurations are written, its owner's alone."""
        self._options = options
        self._workerd_path = workerd
        self._listener = listener
        self._folder = folder
        self._view = view
        self._num_builds = 0
        self._digest = b""
        self._workerd: Workerd | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run it until `stop`; raises ConfigUnusable or WorkerdEnded if it cannot even start, or ends by itself."""
        changes = awatch(self._options.folder, watch_filter=_Sources(), stop_event=stop, debounce=100, step=20)
        # Watched before it is built: no change comes in between unseen.
        next_change = asyncio.ensure_future(anext(changes, None))
        await asyncio.sleep(0)  # lets it begin
        try:
            build = await asyncio.to_thread(self._build)
            await self._exchange(build)
            await self._view.started(build.config, self._listener.getsockname()[1], self._options.upstream)
            while not stop.is_set() and (found := await self._until(next_change)) is not None:
                next_change = asyncio.ensure_future(anext(changes, None))
                await self._reload(found)
        finally:
            stop.set()
            await asyncio.gather(next_change, return_exceptions=True)
            if self._workerd is not None:
                await self._workerd.stop()

    async def _until(self, next_change: asyncio.Future[Changes | None]) -> Changes | None:
        """Return the next change, None at the end; raises WorkerdEnded if workerd ends before it."""
        assert self._workerd is not None, "it runs since the start"
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
        """Run what the folder holds now; if that cannot run, what ran before goes on."""
        names = self._names(changes)
        try:
            build = await asyncio.to_thread(self._build)
            if build.digest == self._digest:
                return
            await self._exchange(build)
        except (ConfigUnusable, WorkerdEnded, OSError) as error:  # a file may go while it is read
            self._digest = b""  # what ran before is loaded anew when it comes back, which says that all is well
            self._view.failed(names, str(error))
        else:
            self._view.reloaded(names, build.config)

    def _names(self, changes: Changes) -> list[str]:
        """Return which files changed, without those that an editor made and took away, if there are others."""
        paths = [Path(path) for _, path in changes]
        there = [path for path in paths if path.exists()] or paths
        return sorted({str(path.relative_to(self._options.folder)) for path in there})

    def _build(self) -> _Build:
        options = self._options
        config = read_config(options.folder, options.environment, ignore_unsupported=options.ignore_unsupported)
        config = _with_date(config, newest_date(self._workerd_path))
        modules = [] if config.main is None else modules_of(config)
        if self._num_builds:  # workerd reads its configuration once
            shutil.rmtree(self._folder / str(self._num_builds))
        self._num_builds += 1
        folder = self._folder / str(self._num_builds)
        folder.mkdir()
        path = worker_capnp.write(folder, config, modules, options.upstream)
        digest = hashlib.sha256()
        for file in sorted(folder.iterdir()):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)} ".encode() + content)
        return _Build(config, path, digest.digest(), modules[0].source_map if modules else None)

    async def _exchange(self, build: _Build) -> None:
        """Start another workerd on the same socket, then end the one before: nobody finds the port closed."""
        started = await Workerd.start(self._workerd_path, build.path, self._listener, _write_error, build.located)
        before, self._workerd, self._digest = self._workerd, started, build.digest
        if before is not None:
            await before.stop()


class _Sources(DefaultFilter):
    """Not what tools write beside the sources."""

    ignore_dirs = (*DefaultFilter.ignore_dirs, ".wrangler")


async def dev(options: DevOptions, view: View) -> None:
    """Run a Worker until a signal ends it; raises ConfigUnusable or WorkerdEnded."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    workerd = find_workerd(options.folder)
    with listen(options.port) as listener, tempfile.TemporaryDirectory(prefix="tandem-worker-") as folder:
        await WorkerDev(options, workerd, listener, Path(folder), view).run(stop)


def _with_date(config: WorkerConfig, newest: str | None) -> WorkerConfig:
    """Let a Worker of tomorrow run in the workerd of today, and say so, as wrangler does."""
    if newest is None or config.compatibility_date <= newest:
        return config
    note = (
        f"this workerd knows compatibility dates up to {newest}, so {config.compatibility_date} is not in force; "
        "a newer one: `npm install --save-dev workerd@latest`"
    )
    return replace(config, compatibility_date=newest, notes=(*config.notes, note))


def _write_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

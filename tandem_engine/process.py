"""Runs the engine process.

    read EngineConfig -> pin to cores -> load (memory of the cores' node) -> Ready -> (commands -> one step)*
        -> Shutdown, or the front is gone

`tandem_engine.client` starts this process. That of another engine calls `main` with its own `Assemble`. The process
ignores SIGINT and SIGTERM: the front decides when it ends. Torch is imported only after the affinity is set, because
OpenMP counts cores once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from tandem_engine.channel import ChannelClosed, Received, SyncChannel, close_all
from tandem_engine.cores import use_cores
from tandem_engine.device_memory import DeviceMemory
from tandem_engine.errors import ModelUnusable
from tandem_engine.memory_node import use_memory_node
from tandem_engine.messages import EngineFailed, LoadProgress, Shutdown
from tandem_engine.settings import EngineConfig
from tandem_machine.limits import with_remedy

_PR_SET_PDEATHSIG = 1
_IDLE_SECONDS = 0.25


class Core(Protocol):
    """What the process runs: `EngineCore` or `EncoderCore`. Any number of commands, then a step while there is work."""

    def begin_turn(self) -> None:
        """Called before the commands between two steps."""
        ...

    def handle_some(self, command: Any, *fds: int) -> Sequence[object] | None:
        """Return a command's immediate events. None: handle it again before any other, after a step."""
        ...

    def has_work(self) -> bool: ...

    def is_held(self) -> bool:
        """Whether `has_work` may become true without a command: look again soon."""
        ...

    def run_step(self, emit: Callable[[Any], None]) -> None:
        """Run one step and emit its events, or do what can be done while one runs on a thread of its own."""
        ...

    def wake_fd(self) -> int | None:
        """Return the eventfd that is written when `run_step` has something to do; None: call it at once."""
        ...

    def close(self) -> None:
        """Wait for the step that runs, if one does, and end the core's threads."""
        ...


Report = Callable[[str, float], None]
Assemble = Callable[[EngineConfig, Report, int | None], tuple[Core, object, list[int]]]
"""Loads the model, with memory of a NUMA node. Returns the core, the event that it is ready, and the event's
descriptors; raises ModelUnusable."""


def main(arguments: Sequence[str] | None = None, assemble: Assemble | None = None) -> int:
    """Serve the front at the other end of the socket `--fd`; return the exit code.

    Without `assemble`: with Tandem's own engine.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fd", type=int, required=True, help="socket inherited from the front")
    _ignore_signals()
    faulthandler.enable()  # a signal that ends this process leaves stacks on stderr
    channel = SyncChannel(socket.socket(fileno=parser.parse_args(arguments).fd))
    try:
        config, early = _read_config(channel)
        use_cores(config)
        core = _load(config, channel, assemble or _assemble)
        try:
            _serve(core, channel, early)
        finally:
            core.close()
    except ChannelClosed:
        return 0
    except ModelUnusable as error:
        return _fail(channel, EngineFailed(str(error), "unsupported"))
    except Exception as error:  # noqa: BLE001 - report any error to the front before the process ends
        traceback.print_exc()
        return _fail(channel, EngineFailed(with_remedy(f"{type(error).__name__}: {error}")))
    return 0


def _serve(core: Core, channel: SyncChannel, commands: list[Received]) -> None:
    """Alternate commands and steps; wait for the socket while there is no work, and for the step that runs."""
    waiting = deque(commands)
    memory = DeviceMemory()
    while True:
        if (used := memory.change()) is not None:
            channel.send(used)
        core.begin_turn()
        while waiting:
            if isinstance(waiting[0].message, Shutdown):
                return
            if (events := _handle(core, waiting[0])) is None:
                break  # the rest of a slab is copied after the next step
            waiting.popleft()
            _send_all(channel, events)
        if core.has_work():
            core.run_step(channel.send)
        if (running := core.wake_fd()) is not None:
            channel.wait_with(running)
            waiting += channel.receive(wait=False)
            continue
        is_idle = not waiting and not core.has_work()
        if is_idle and not channel.has_come(_IDLE_SECONDS):
            _release_freed_memory()
        waiting += channel.receive(wait=is_idle and not core.has_work() and not core.is_held())


def _handle(core: Core, received: Received) -> Sequence[object] | None:
    try:
        return core.handle_some(received.message, *received.fds)
    finally:
        close_all(received.fds)


def _send_all(channel: SyncChannel, events: Sequence[object]) -> None:
    for event in events:
        channel.send(event)


def _load(config: EngineConfig, channel: SyncChannel, assemble: Assemble) -> Core:
    """Load the model and send EncoderReady, or Ready with the pool's descriptor."""
    report = _progress_reporter(channel)
    core, ready, fds = assemble(config, report, use_memory_node(report))
    gc.collect()
    gc.freeze()  # else a collection over all of torch's objects could delay any step by 70 to 190 ms
    _release_freed_memory()
    channel.send(ready, fds)
    return core


def _assemble(config: EngineConfig, report: Report, numa_node: int | None) -> tuple[Core, object, list[int]]:
    report("importing torch", 0.0)
    with _without_collections():
        from tandem_engine.models.models_package import import_models_package
        from tandem_engine.models.without_compiler import without_compiler  # imports torch: after the affinity is set
        from tandem_engine.models.without_distributed import without_distributed

    with without_compiler(), without_distributed():
        if config.encodes:
            with _without_collections():
                import_models_package()
                from tandem_engine.encoder.assembly import assemble_encoder

            return *assemble_encoder(config, report, numa_node), []
        with _without_collections():
            import_models_package()
            from tandem_engine.assembly import assemble

        assembled = assemble(config, report, numa_node)
        return assembled.core, assembled.ready, list(assembled.region_fds)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import without collections, now and later: imports make no garbage.

    Collections over all of torch's objects would take 0.4 s of processor time until the engine is ready.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _release_freed_memory() -> None:
    """Return memory that loading or steps have freed to the system: 20 to 60 MB."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only glibc has it
        trim(0)


def _progress_reporter(channel: SyncChannel) -> Report:
    return lambda stage, fraction: channel.send(LoadProgress(stage, fraction))


def _read_config(channel: SyncChannel) -> tuple[EngineConfig, list[Received]]:
    """Return the first message, and the messages that arrived with it."""
    first, *rest = channel.receive(wait=True)
    assert isinstance(first.message, EngineConfig), "the front sends the configuration first"
    return first.message, rest


def _ignore_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":  # a step may take long: end at once if the front dies
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _fail(channel: SyncChannel, event: EngineFailed) -> int:
    with contextlib.suppress(ChannelClosed):  # the front is gone
        channel.send(event)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Hands prompts over between two processes through device memory, and kills one of them in the middle of each.

    owner (forked)  --offer, Reserve, Seal-->  KV service (here)  --Watch, fetch-->  reader (forked)
          └────────── device memory of the stub driver, by descriptor ──────────────────┘

Every round starts one hand-over, waits until owner or reader has come to a stage, and then kills one of the two, or
stops the reader until its lease has expired and its blocks are written anew. The others must come to a good end. Every
`_REST_ROUNDS` rounds nothing may be left: no handle, no region, no used block, no memory, no descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesRequest
from tandem_runtime.identity import new_incarnation
from tandem_runtime.kv.layout import layout_digest
from tests.device_kills.owner import own
from tests.device_kills.reader import read
from tests.device_kills.world import (
    GEOMETRY,
    LAYOUT,
    LEASE_SECONDS,
    MOST_BLOCKS,
    Churn,
    Count,
    Held,
    Outcome,
    Place,
    Reached,
    Task,
    receive,
)
from tests.device_memory import device_memory_of
from tests.kv_transfer_svc.host import Host, nothing_is_left, running_host
from tests.kv_transfer_svc.layout import SIGNER

_REST_ROUNDS = 25
_COPY_USEC = "150"
"""Per 4 KiB: a hand-over copies for some 10 ms."""
_ANSWER_SECONDS = 20.0

FAULTS = [
    ("kill owner", "owner", "allocated"),
    ("kill owner", "owner", "reserved"),
    ("kill owner", "owner", "half sealed"),
    ("kill owner", "owner", "sealed"),
    ("kill owner", "reader", "mapped"),
    ("kill owner", "reader", "copying"),
    ("kill owner", "reader", "copied"),
    ("kill reader", "reader", "watching"),
    ("kill reader", "reader", "mapped"),
    ("kill reader", "reader", "copying"),
    ("kill reader", "reader", "copied"),
    ("pause reader", "reader", "copying"),
]
"""What is done, and whose stage it waits for."""


class Leak(AssertionError):
    """Something was left, or wrong bytes were taken for right ones."""


@dataclass
class Tally:
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_rests: int = 0

    def __str__(self) -> str:
        lines = [f"{count:6}  {name}" for name, count in sorted((*self.faults.items(), *self.outcomes.items()))]
        return "\n".join([*lines, f"{self.num_rests:6}  times at rest, with nothing left"])


class _Peer:
    """A forked process, and the end of its connection."""

    def __init__(self, context: Any, target: Callable[[Connection, Place], None], host: Host) -> None:
        self.incarnation = new_incarnation()
        place = Place(host.socket, host.address, self.incarnation)
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, place))
        self.process.start()
        theirs.close()
        self.num_descriptors: int | None = None

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed; the driver knows
            self._connection.send(message)

    async def until_reached(self, number: int, stage: str) -> bool:
        """Wait for a stage of a task; False: the task ended before."""
        while True:
            message = await self._receive()
            if isinstance(message, Outcome):
                self._early = message
                return False
            if message is None or message == Reached(number, stage):
                return message is not None

    async def outcome(self, number: int) -> Outcome | None:
        """Return the end of a task; None if the process was killed before."""
        if (early := self.__dict__.pop("_early", None)) is not None:
            return early  # type: ignore[no-any-return]
        while True:
            message = await self._receive()
            if message is None or (isinstance(message, Outcome) and message.number == number):
                return message

    async def held(self) -> Held:
        self.send(Count())
        while not isinstance(message := await self._receive(), Held):
            assert message is not None, "a process at rest has ended"
        return message

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._connection.close()

    def close(self) -> None:
        self._connection.close()
        self.process.join(10)

    async def _receive(self) -> Any:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await receive(self._connection)


class _Driver:
    def __init__(self, host: Host, context: Any, seed: int) -> None:
        self.tally = Tally()
        self._host = host
        self._context = context
        self._random = random.Random(seed)
        self._number = 0

    async def start(self) -> None:
        self._owner, self._reader = await self._started(own), await self._started(read)

    async def _started(self, target: Callable[[Connection, Place], None]) -> _Peer:
        peer = _Peer(self._context, target, self._host)
        if not await peer.until_reached(0, "ready"):
            raise Leak(f"{target.__name__} did not start")
        return peer

    async def round(self, fault: str, whose: str, stage: str) -> None:
        task = self._task(self._random.randint(1, MOST_BLOCKS))
        self._owner.send(task)
        self._reader.send(task)
        peer = self._owner if whose == "owner" else self._reader
        if not await peer.until_reached(task.number, stage):
            fault = "none: the hand-over ended before"
        elif stage == "copying":
            await asyncio.sleep(self._random.uniform(0, 0.008))  # where in the copy is left to chance
        self.tally.faults[f"{fault} at {stage}"] += 1
        if fault == "kill owner":
            self._owner.kill()
            self._judge(await self._reader.outcome(task.number), "owner killed")
            self._owner = await self._started(own)
        elif fault == "kill reader":
            self._reader.kill()
            self._note(await self._owner.outcome(task.number), "reader killed")
            self._reader = await self._started(read)
        elif fault == "pause reader":
            await self._pause(task)
        else:
            self._judge(await self._reader.outcome(task.number), "undisturbed")

    async def _pause(self, task: Task) -> None:
        """Stop the reader in the middle of its copy until the owner has used all its blocks for something else."""
        self._note(await self._owner.outcome(task.number), "reader paused")
        os.kill(self._reader.process.pid, signal.SIGSTOP)
        try:
            await self._until(lambda: not self._host.store.num_live, "the handle of a stopped reader")
            self._owner.send(Churn())
            await self._owner.held()  # answered after it
        finally:
            os.kill(self._reader.process.pid, signal.SIGCONT)
        self._judge(await self._reader.outcome(task.number), "reader paused")

    def _task(self, num_blocks: int) -> Task:
        self._number += 1
        handle = pb.KvHandle(
            handle_id=secrets.token_bytes(16),
            request_id=f"request-{self._number}",
            attempt=1,
            prefill_incarnation=self._owner.incarnation,
            holder_address=self._host.address,
            holder_incarnation=self._host.incarnation,
            layout_digest=layout_digest(LAYOUT),
            num_tokens=num_blocks * GEOMETRY.block_size,
            num_readers=1,
            deadline_unix_ms=int((time.time() + 60) * 1000),
        )
        return Task(self._number, SIGNER.sign(handle).SerializeToString(), num_blocks)

    def _judge(self, outcome: Outcome | None, when: str) -> None:
        if outcome is None:
            raise Leak(f"the reader ended by itself ({when})")
        if outcome.is_torn:
            raise Leak(f"wrong bytes were taken for right ones ({when}): {outcome}")
        self._note(outcome, when)

    def _note(self, outcome: Outcome | None, when: str) -> None:
        self.tally.outcomes[f"{when}: {outcome.what if outcome else 'gone'}"] += 1

    # --------------------------------------------------------------------------------------------- nothing is left

    async def rest(self) -> None:
        """Hand one prompt over undisturbed, and check that nothing else is kept anywhere.

        The owner is killed before once more, so that the reader and the KV service have something to give up.
        """
        await self.round("kill owner", "reader", "copied")
        task = self._task(MOST_BLOCKS)
        self._owner.send(task)
        self._reader.send(task)
        outcome = await self._reader.outcome(task.number)
        if outcome != Outcome(task.number, "read"):
            raise Leak(f"an undisturbed hand-over came to {outcome}")
        await self._until(lambda: nothing_is_left(self._host), "handles at the KV service")
        await self._check_tables()
        await self._check(self._owner, num_ranges=1)
        await self._check(self._reader, num_ranges=2)
        self._check_memory()
        self.tally.num_rests += 1

    async def _check_tables(self) -> None:
        async def is_empty() -> bool:
            tables = await self._host.service.Tables(TablesRequest(max_rows=1000), None)
            owners = [row.owner_incarnation for row in tables.regions]
            return owners == [self._owner.incarnation] and not tables.handles and not tables.unreported

        await self._until(is_empty, "rows of the tables")

    async def _check(self, peer: _Peer, num_ranges: int) -> None:
        held = Held(0, 0, 0)

        async def is_empty() -> bool:
            nonlocal held
            held = await peer.held()
            return held.num_blocks_used == 0

        await self._until(is_empty, "used blocks")
        if held.num_device_ranges != num_ranges:
            raise Leak(f"{held.num_device_ranges} ranges of device memory are mapped, expected {num_ranges}")
        if peer.num_descriptors is not None and held.num_descriptors > peer.num_descriptors:
            raise Leak(f"{held.num_descriptors} descriptors are open, before it were {peer.num_descriptors}")
        peer.num_descriptors = held.num_descriptors

    def _check_memory(self) -> None:
        owned, read_ = (device_memory_of(peer.process.pid) for peer in (self._owner, self._reader))
        if len(owned) != 1 or len(read_) != 2 or not owned < read_ or device_memory_of(os.getpid()) != owned:
            raise Leak(
                f"device memory is held: owner {owned}, reader {read_}, KV service {device_memory_of(os.getpid())}"
            )

    async def _until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if time.monotonic() > deadline:
                raise Leak(f"left after {_ANSWER_SECONDS:g} s: {what}")
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self._owner.close()
        self._reader.close()


async def run(count: int, seed: int, driver_folder: Path, report: Callable[[str], None] = lambda line: None) -> Tally:
    """Disturb `count` hand-overs; raises Leak. `driver_folder` has the stub as libcuda.so.1."""
    rng = random.Random(seed)
    with _environment(driver_folder), tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.device_kills.owner", "tests.device_kills.reader"])
        async with running_host(Path(folder)) as host, _swept(host):
            driver = _Driver(host, context, seed)
            await driver.start()
            try:
                faults: list[tuple[str, str, str]] = []
                for number in range(1, count + 1):
                    faults = faults or rng.sample(FAULTS, len(FAULTS))
                    await driver.round(*faults.pop())
                    if number % _REST_ROUNDS == 0 or number == count:
                        await driver.rest()
                        report(f"{number} hand-overs disturbed")
            finally:
                driver.close()
    return driver.tally


@contextlib.asynccontextmanager
async def _swept(host: Host) -> AsyncIterator[None]:
    """Expire leases as the process of a KV service does, with short leases."""
    host.store.lease_seconds = LEASE_SECONDS

    async def sweep() -> None:
        while True:
            await asyncio.sleep(0.05)
            host.service.sweep()

    sweeping = asyncio.create_task(sweep())
    try:
        yield
    finally:
        sweeping.cancel()


@contextlib.contextmanager
def _environment(driver_folder: Path) -> Any:
    """Start processes with the stub as their driver; the linker reads its path when a process starts."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), str(root / "protos" / "gen"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {
        "LD_LIBRARY_PATH": str(driver_folder),
        "CUDA_STUB_COPY_USEC": _COPY_USEC,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

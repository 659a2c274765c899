"""What does a worker do about moving KV, and what is it told of?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_engine import messages
from tandem_runtime.errors import TandemError
from tandem_worker.requests import ActiveRequest
from tandem_worker.spans import PhaseSpans

if TYPE_CHECKING:
    from tandem_worker.front import WorkerFront


class HandOver(Protocol):
    """A worker's side of moving KV: prefill seals slabs, decode pulls them."""

    spans: PhaseSpans

    def bind(self, front: WorkerFront) -> None:
        """Called once, before anything else."""

    def mode(self, submit: pb.Submit) -> messages.Mode:
        """Return how the engine is to run a request; raises InvalidRequest if this role cannot."""

    def ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        """The engine has loaded; `fds` holds the descriptor of the pool's region, where it has one."""

    async def prepared(self) -> None:
        """Return once requests can be taken; called after `ready`."""

    def reserved(self, request: ActiveRequest, reserved: messages.Reserved) -> None: ...

    def sealed(self, request: ActiveRequest, sealed: messages.SealedBlocks) -> None: ...

    def sampled(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None: ...

    def imported(self, imported: messages.SlabImported) -> None: ...

    def ended(self, request: ActiveRequest, error: TandemError | None) -> None:
        """The request is over here; `error` says why, if it did not simply finish."""

    def counters(self) -> dict[str, float]: ...

    def fill_tables(self, reply: TablesReply, requests: Sequence[ActiveRequest], max_rows: int) -> None:
        """Say for which of its requests, those that have ended included, the pool keeps or awaits whose blocks."""

    @property
    def kv_address(self) -> str: ...

    async def drained(self) -> None:
        """Return when no other process needs this worker's blocks any more."""

    async def close(self) -> None: ...

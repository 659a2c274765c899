"""The interface between a worker's front and its role: a prefill worker produces KV blocks, a decode worker reads them.

`prefill_svc.kv_producer` and `decode_svc.kv_consumer` implement the interface.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_engine import messages
from tandem_runtime.errors import TandemError
from tandem_worker.requests import ActiveRequest, PhaseSpan


class KVConnector(Protocol):
    """Moves the KV blocks of a worker's requests; every method runs on the event loop."""

    def mode(self, submit: pb.Submit) -> messages.Mode:
        """Return how the engine runs a request; raises InvalidRequest if this role cannot run the request."""

    def on_ready(self, ready: messages.Ready, fds: Sequence[int]) -> None:
        """The engine has loaded; `fds` holds the descriptor of the pool's region if the engine lends one."""

    async def wait_ready(self) -> None:
        """Return once requests can be accepted; called after `on_ready`."""

    def on_reserved(self, request: ActiveRequest, reserved: messages.Reserved) -> None: ...

    def on_sealed(self, sealed: messages.SealedBlocks) -> None:
        """Blocks of a prefill can be read; perhaps after its last output."""

    def on_output(self, request: ActiveRequest, output: messages.RequestOutput, wire: pb.TokenOutput) -> None:
        """The engine has sampled tokens; `wire` may still be changed."""

    def on_imported(self, imported: messages.SlabImported) -> None: ...

    def on_end(self, request: ActiveRequest, error: TandemError | None) -> None:
        """The request has ended on this worker; `error` is None if the request finished."""

    def spans(self, ledger: pb.PhaseLedger) -> Iterable[PhaseSpan]:
        """Return the spans of a finished request."""

    def counters(self) -> dict[str, float]: ...

    def fill_tables(self, reply: TablesReply, requests: Sequence[ActiveRequest], max_rows: int) -> None:
        """Add the handles whose blocks the pool keeps or awaits, those of ended requests included."""

    @property
    def kv_address(self) -> str: ...

    async def wait_drained(self) -> None:
        """Return once no other process needs this worker's blocks."""

    async def close(self) -> None: ...

"""The input of one audit: the tables of the services that answered, and the control plane's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from control_plane.fleet.registry import Worker
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import HandleRow, TablesReply


@dataclass(frozen=True, eq=False)
class AuditedService:
    """One process and its tables."""

    worker: Worker
    tables: TablesReply

    @property
    def incarnation(self) -> str:
        return self.worker.incarnation

    @property
    def is_kv(self) -> bool:
        return self.worker.role == pb.WORKER_ROLE_KV

    @property
    def is_complete(self) -> bool:
        """Whether the tables have all rows. Otherwise a missing row proves nothing."""
        return not self.tables.num_left_out

    @cached_property
    def handles(self) -> Mapping[bytes, HandleRow]:
        return {row.handle_id: row for row in self.tables.handles}

    @cached_property
    def held(self) -> frozenset[bytes]:
        return frozenset(row.handle_id for row in self.tables.holds)

    @cached_property
    def pulled(self) -> frozenset[tuple[bytes, str]]:
        return frozenset((row.handle_id, row.reader_id) for row in self.tables.pulls)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that one audit compares. `answered` and `silent` together have all registered incarnations."""

    answered: Mapping[str, AuditedService]
    silent: frozenset[str] = frozenset()
    running: frozenset[tuple[str, str, int]] = frozenset()
    """Incarnation, request id and attempt of this gateway's running requests."""
    gateway_id: str = ""
    is_alone: bool = True
    """Whether this is the only control-plane replica. It does not know the requests of others."""
    _request_ids: frozenset[str] = field(init=False)
    _by_address: Mapping[str, AuditedService] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_address", {each.worker.info.address: each for each in self.answered.values()})
        object.__setattr__(self, "_request_ids", frozenset(_with_prompt_ids(each[1] for each in self.running)))

    def is_here(self, incarnation: str) -> bool:
        """Return whether a process with this incarnation is registered."""
        return incarnation in self.answered or incarnation in self.silent

    def at(self, address: str) -> AuditedService | None:
        """Return the service at an address, if it answered."""
        return self._by_address.get(address)

    def wants(self, request_id: str, deadline_unix_ms: int, now_unix_ms: int) -> bool:
        """Return whether a dispatcher may have this request; another replica may, until the request's deadline."""
        if deadline_unix_ms < now_unix_ms:
            return False
        return not self.is_alone or request_id in self._request_ids


def _with_prompt_ids(request_ids: Iterable[str]) -> Iterable[str]:
    """Yield each id, and without its choice suffix: decode's ids are `<request id>-<choice>`."""
    for request_id in request_ids:
        yield request_id
        yield request_id.rpartition("-")[0]

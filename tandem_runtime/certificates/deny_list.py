"""Keeps the list of revoked identities that the control plane sends with each heartbeat reply.

Entries are added only: ids are random and never issued twice. A process that cannot reach the control plane, or a
control plane without its database, keeps the last list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem_runtime.certificates.names import Identity
from tandem_runtime.log import get_logger

log = get_logger(__name__)

Listener = Callable[[frozenset[str]], None]

MAX_DENIED = 65_536
"""The most entries kept, 5 MB. A fleet that has revoked more should rotate its authority."""

_MAX_LOGGED = 16


class DenyList:
    """The ids of revoked processes; on one event loop. `number` is the largest of the lists applied."""

    def __init__(self) -> None:
        self.number = 0
        self._ids: set[str] = set()
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, identity: Identity) -> bool:
        return identity.id in self._ids

    def listen(self, on_denied: Listener) -> None:
        """Call `on_denied` at once with each set of newly revoked ids."""
        self._listeners.append(on_denied)

    def apply(self, number: int, ids: Iterable[str]) -> None:
        """Add the ids of a reply that leads to list `number`. A late or repeated reply changes nothing."""
        new = frozenset(ids) - self._ids
        self.number = max(self.number, number)
        if not new:
            return
        num_denied = len(self._ids)
        if num_denied + len(new) > MAX_DENIED:
            log.error("deny_list_full", num_denied=num_denied, limit=MAX_DENIED, remedy="tandem fleet rotate-ca")
            new = frozenset(sorted(new)[: MAX_DENIED - num_denied])
        self._ids |= new
        log.warning("identities_denied", ids=sorted(new)[:_MAX_LOGGED], num_denied=len(self._ids), number=self.number)
        for listener in list(self._listeners):
            listener(new)

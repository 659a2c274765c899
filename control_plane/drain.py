"""Defines the end of a gateway: what is new is refused, what runs may end by itself, what is left gets an error."""

from __future__ import annotations

from collections.abc import Callable

from tandem_runtime.errors import Draining

_RETRY_SECONDS = 1.0


class GatewayDraining(Draining):
    """Raised by the gateway only: this gateway ends, not a worker. The ledger has such a request as aborted."""


def refusal() -> GatewayDraining:
    """Return the error of a request that came after the end of the gateway had begun. Each request has its own."""
    return GatewayDraining(
        "the gateway stops and takes no new requests; send the request again: another gateway, or the next start of "
        "this one, answers it",
        retry_after_seconds=_RETRY_SECONDS,
    )


def time_is_over() -> GatewayDraining:
    """Return the error of a request that did not end in time. Each request has its own: notes are made on errors."""
    return GatewayDraining(
        "the gateway stops, and the request did not end within its --drain-seconds; send the request again: another "
        "gateway, or the next start of this one, answers it",
        retry_after_seconds=_RETRY_SECONDS,
    )


class Drain:
    """Knows whether the end of this gateway has begun, and whom to tell when the time to drain is over."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_over = False
        self._unanswered: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.has_begun = True

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` when no request has any time left."""
        self._unanswered.append(callback)

    def end(self) -> None:
        """End what still has no answer; call it some time after the requests were told to end."""
        self.is_over = True
        for callback in self._unanswered:
            callback()

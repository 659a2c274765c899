"""Measures links with moving averages over real transfers, and exports the values as metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Observation

from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics

_RATE_BYTES = 256 << 10
"""A smaller transfer counts for latency only, not for bytes per second."""
_FULL_WEIGHT_BYTES = 16 << 20
_MAX_WEIGHT = 0.5
_LATENCY_WEIGHT = 0.2
_LEAST_RUNS = 1e-6
"""Of recent transfers, however many the last run has: a report is to have a bound."""
_SLOW_SHARE = 0.25


@dataclass
class LinkStats:
    """Stats of one link and its current transport; call `reset_rate` when the transport changes.

    Transfers at once share the link. They are one run, whose time counts once: each from the end of the one before.
    """

    best_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    num_transfers: int = 0
    num_bytes: int = 0
    num_errors: int = 0
    num_fallbacks: int = 0
    _bytes: float = 0.0
    _seconds: float = 0.0
    _runs: float = 0.0
    """Of recent transfers, older ones with less weight."""
    _ended_at: float = -math.inf
    """The end of the last transfer that counts for the rate."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of recent runs, with the round trip of each; 0: not measured yet."""
        return self._bytes / self._seconds if self._seconds else 0.0

    @property
    def bytes_per_run(self) -> float:
        """Bytes of a recent run; 0: not measured yet."""
        return self._bytes / self._runs if self._runs else 0.0

    def transferred(self, num_bytes: int, begun: float, ended: float, *, is_alone: bool = True) -> None:
        """Count a transfer, from and to these seconds of one clock; call in the order of their ends.

        `is_alone`: no other ran meanwhile, else it says nothing of the link's latency.
        """
        self.num_transfers += 1
        self.num_bytes += num_bytes
        if is_alone or num_bytes >= _RATE_BYTES:
            self.measured(num_bytes, begun, ended)

    def measured(self, num_bytes: int, begun: float, ended: float) -> None:
        """Add one duration to the averages; a larger transfer has a larger weight."""
        seconds = ended - begun
        if num_bytes < _RATE_BYTES:
            before = self.latency_seconds or seconds
            self.latency_seconds = before + _LATENCY_WEIGHT * (seconds - before)
            return
        kept = 1 - min(_MAX_WEIGHT, num_bytes / _FULL_WEIGHT_BYTES)
        self._bytes = kept * self._bytes + num_bytes
        self._seconds = kept * self._seconds + max(1e-9, ended - max(begun, self._ended_at))
        self._runs = max(_LEAST_RUNS, kept * self._runs + (begun >= self._ended_at))
        self._ended_at = ended
        self.best_bytes_per_second = max(self.best_bytes_per_second, self.bytes_per_second)

    def begin_with(self, probed: LinkStats) -> None:
        """Start new averages with those of a probe of another transport."""
        self.reset_rate()
        self._bytes, self._seconds, self._runs = probed._bytes, probed._seconds, probed._runs
        self.best_bytes_per_second, self.latency_seconds = probed.best_bytes_per_second, probed.latency_seconds

    def reset_rate(self) -> None:
        """Start new averages for another transport."""
        self.best_bytes_per_second = self.latency_seconds = self._bytes = self._seconds = self._runs = 0.0
        self._ended_at = -math.inf

    @property
    def slowness(self) -> str:
        """Describe how slow the link is; "" if it is not slow."""
        if self.bytes_per_second >= _SLOW_SHARE * self.best_bytes_per_second:
            return ""
        return f"slow: {self.bytes_per_second / self.best_bytes_per_second:.0%} of its best"


def export_gauges(links: Callable[[], Sequence[pb.KvLink]]) -> None:
    """Export the links that `links` returns, by host and transport. Called in any thread."""
    meter = metrics.meter()
    for name, unit, description, pick in _GAUGES:
        meter.create_observable_gauge(f"tandem.kv.link.{name}", [_observed(links, pick, max)], unit, description)
    for name, unit, description, pick in _TOTALS:
        meter.create_observable_counter(f"tandem.kv.link.{name}", [_observed(links, pick, sum)], unit, description)


Pick = Callable[[pb.KvLink], float]

_GAUGES: tuple[tuple[str, str, str, Pick], ...] = (
    ("bytes_per_second", "By/s", "Bytes per second of the link, a moving average.", lambda it: it.bytes_per_second),
    ("latency", "s", "Duration of the link's smallest transfers.", lambda it: it.latency_ms / 1000),
    ("is_impaired", "1", "1 if the link uses a fallback or is slow.", lambda it: float(it.note != "")),
)
_TOTALS: tuple[tuple[str, str, str, Pick], ...] = (
    ("bytes", "By", "Bytes received over the link.", lambda it: it.num_bytes),
    ("transfers", "{transfer}", "Transfers over the link.", lambda it: it.num_transfers),
    ("errors", "{error}", "Broken connections and corrupted transfers.", lambda it: it.num_errors),
    ("fallbacks", "{transfer}", "Transfers over gRPC after a transport failed.", lambda it: it.num_fallbacks),
)


def _observed(
    links: Callable[[], Sequence[pb.KvLink]], pick: Pick, merge: Callable[[Iterable[float]], float]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """A host may have several links for a while: its service was restarted at another address."""

    def observations(options: CallbackOptions) -> Iterable[Observation]:
        found: dict[tuple[str, str], list[float]] = {}
        for link in links():
            found.setdefault((link.host_id, link.transport), []).append(pick(link))
        return [
            Observation(merge(values), {"peer": peer, "transport": transport})
            for (peer, transport), values in found.items()
        ]

    return observations

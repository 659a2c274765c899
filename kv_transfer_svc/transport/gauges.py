"""Which figures of its links does a metrics backend get?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Observation

from tandem.v1 import types_pb2 as pb
from tandem_runtime import metrics


def export(links: Callable[[], Sequence[pb.KvLink]]) -> None:
    """Offer what `links` says, which is called on the exporter's thread; free where no endpoint is configured."""
    meter = metrics.meter()

    def observe(pick: Callable[[pb.KvLink], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observations(options: CallbackOptions) -> Iterable[Observation]:
            for link in links():
                yield Observation(pick(link), {"peer": link.address, "transport": link.transport})

        return observations

    gauges: tuple[tuple[str, str, str, Callable[[pb.KvLink], float]], ...] = (
        ("bytes_per_second", "By/s", "Bytes per second of the link, a moving average.", lambda it: it.bytes_per_second),
        ("latency", "ms", "Duration of the link's smallest transfers.", lambda it: it.latency_ms),
        ("is_impaired", "1", "1 if the link fell back or is slow.", lambda it: float(it.note != "")),
    )
    totals: tuple[tuple[str, str, str, Callable[[pb.KvLink], float]], ...] = (
        ("bytes", "By", "Bytes that came over the link.", lambda it: it.num_bytes),
        ("transfers", "{transfer}", "Transfers over the link.", lambda it: it.num_transfers),
        ("errors", "{error}", "Broken connections and spoilt bytes.", lambda it: it.num_errors),
        ("fallbacks", "{transfer}", "Transfers over gRPC because a better way failed.", lambda it: it.num_fallbacks),
    )
    for name, unit, description, pick in gauges:
        meter.create_observable_gauge(f"tandem.kv.link.{name}", [observe(pick)], unit, description)
    for name, unit, description, pick in totals:
        meter.create_observable_counter(f"tandem.kv.link.{name}", [observe(pick)], unit, description)

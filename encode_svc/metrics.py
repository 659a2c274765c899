"""Exports what an encode worker's engine has done."""

from __future__ import annotations

from collections.abc import Callable

from tandem.v1 import types_pb2 as pb
from tandem_engine.encoder.messages import EncoderStats
from tandem_worker import device_metrics, engine_totals


def export_metrics(stats: Callable[[], EncoderStats | None], memory: Callable[[], pb.MemoryReport]) -> None:
    """Export the engine's stats after its last step, and its devices. Both are called in any thread."""

    def num_tokens() -> dict[str, float]:
        now = stats()
        return {"encode": now.counters["encoded_tokens"]} if now is not None else {}

    engine_totals.export(stats, engine_totals.ENCODER)
    device_metrics.export(memory, num_tokens)

"""Exports what an engine has done since its start: one metric for each of its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from tandem_runtime import metrics


class Stats(Protocol):
    """Of any engine, after its last step."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def counters(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Total:
    """How a counter of an engine is exported: under `tandem.worker.<name>`."""

    counter: str
    name: str
    unit: str
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_longest: bool = False
    """Whether the counter is a maximum: exported as a gauge."""


_STEPS = (
    Total("steps", "steps", "{step}", "Steps of the engine."),
    Total("step_seconds", "step.duration", "s", "Time in steps."),
)

GENERATION = (
    *_STEPS,
    Total("prompt_tokens_computed", "prompt_tokens_computed", "{token}", "Prompt tokens computed."),
    Total("prompt_tokens_cached", "prompt_tokens_cached", "{token}", "Prompt tokens found in the pool or loaded."),
    Total("prompt_tokens_loaded", "prompt_tokens_loaded", "{token}", "Prompt tokens loaded from a store."),
    Total("tokens_generated", "tokens_generated", "{token}", "Tokens sampled."),
    Total("preemptions", "preemptions", "{request}", "Requests whose blocks were taken, and which were queued again."),
    Total("reprefill_tokens", "reprefill_tokens", "{token}", "Prompt tokens that a decode computed."),
    Total("blocks_imported", "blocks_imported", "{block}", "KV blocks copied in by hand-overs."),
    Total("bytes_imported", "import.size", "By", "KV bytes copied in by hand-overs."),
    Total("blocks_corrupt", "blocks_corrupt", "{block}", "KV blocks whose checksum did not match."),
    Total("draft_tokens", "draft_tokens", "{token}", "Draft tokens of speculation."),
    Total("draft_tokens_accepted", "draft_tokens_accepted", "{token}", "Draft tokens that were accepted."),
    Total(
        "longest_answer_step_seconds", "longest_answer_step", "s", "Longest step with an answer in it.", is_longest=True
    ),
    Total(
        "longest_commands_seconds",
        "longest_commands",
        "s",
        "Longest time for all commands between two steps.",
        is_longest=True,
    ),
    Total("longest_copy_seconds", "longest_copy", "s", "Longest time for all KV copies of a step.", is_longest=True),
    Total(
        "longest_copy_cpu_seconds",
        "longest_copy_cpu",
        "s",
        "Longest processor time for all KV copies of a step.",
        is_longest=True,
    ),
)
"""Of prefill and decode engines."""

_CALLS = ("calls", "{call}", "Calls of an encode worker, by outcome.")

ENCODER = (
    *_STEPS,
    Total("encoded_inputs", "encoded_inputs", "{input}", "Texts encoded."),
    Total("encoded_tokens", "encoded_tokens", "{token}", "Tokens of the texts encoded."),
    Total("finished_calls", *_CALLS, labels={"outcome": "finished"}),
    Total("cancelled_calls", *_CALLS, labels={"outcome": "cancelled"}),
    Total("refused_calls", *_CALLS, labels={"outcome": "refused"}),
    Total("failed_calls", *_CALLS, labels={"outcome": "failed"}),
)


def export(stats: Callable[[], Stats | None], totals: Iterable[Total]) -> None:
    """Export the requests in an engine and its `totals`. `stats` is called in any thread; it returns a frozen value."""
    meter = metrics.meter()

    def requests(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            yield Observation(now.num_running, {"state": "running"})
            yield Observation(now.num_waiting, {"state": "waiting"})

    meter.create_observable_gauge("tandem.worker.requests", [requests], "{request}", "Requests here, by state.")
    for name, group in _by_name(totals).items():
        first = group[0]
        create = meter.create_observable_gauge if first.is_longest else meter.create_observable_counter
        create(f"tandem.worker.{name}", [_observed(stats, group)], first.unit, first.description)


def _by_name(totals: Iterable[Total]) -> dict[str, list[Total]]:
    found: dict[str, list[Total]] = {}
    for total in totals:
        found.setdefault(total.name, []).append(total)
    return found


def _observed(
    stats: Callable[[], Stats | None], group: Iterable[Total]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observations(options: CallbackOptions) -> Iterable[Observation]:
        if (now := stats()) is not None:
            for total in group:
                if total.counter in now.counters:
                    yield Observation(now.counters[total.counter], dict(total.labels))

    return observations

"""The alerts: their conditions, what they say, and the page that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from infra.observability.expressions import increase_by, quantile
from infra.observability.pace import Pace

RUNBOOKS = "docs/operate/runbooks"

_BUDGETS = (
    (
        "TandemTtftBudgetBurn",
        "ttft_late",
        "ttft_objective",
        "First tokens of {{ $labels.model }} are late",
        "{{ $value | humanizePercentage }} of the first tokens of {{ $labels.model }} came later than %g s in the "
        "last %s, and about as many in the last %s. The objective permits 5 %%.",
    ),
    (
        "TandemErrorBudgetBurn",
        "request_faults",
        "success_objective",
        "Requests to {{ $labels.model }} fail",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} ended with an error of ours in the "
        "last %s, and about as many in the last %s. The objective permits 0.5 %%.",
    ),
)
_PROCESS = "{{ $labels.role }} {{ $labels.worker }} ({{ $labels.instance }})"
_LAG_SECONDS = 0.05
_PREDICTION_SECONDS = 0.05
"""The mean of predictions may be wrong by this much: a small model's time is mostly fixed costs."""
_CACHE_PREDICTIONS = (
    ("missing", 0.2, "expected in a cache and not found there"),
    ("unexpected", 0.5, "found in a cache where nobody expected them"),
)
"""Prompts that differ between two sample points are found up to 240 tokens longer than expected."""
_BAD_REASONS = "hw_.*|sw_thermal_slowdown"
"""Of throttling: heat and the power supply. A power cap (`sw_power_cap`) is usual under full load."""


@dataclass(frozen=True)
class Alert:
    """One alerting rule. Rules with the same name share their runbook."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def runbook(self) -> str:
        words = re.findall(r"[A-Z][a-z]+", self.name.removeprefix("Tandem"))
        return f"{RUNBOOKS}/{'-'.join(words).lower()}.md"


def alerts(pace: Pace) -> list[Alert]:
    """Return all alerting rules, with the windows and limits of `pace`."""
    return [*_burns(pace), *_fleet(pace), *_capacity(pace), *_processes(pace), *_devices(pace)]


def _burns(pace: Pace) -> Iterator[Alert]:
    for name, ratio, objective, summary, description in _BUDGETS:
        for burn in pace.burns:
            limit = f"{burn.factor} * (1 - scalar(tandem:{objective}:ratio))"
            long, short = (f"tandem:{ratio}:ratio_rate{each} > {limit}" for each in (burn.long, burn.short))
            enough = f"tandem:requests:increase{burn.long} >= {pace.min_requests}"
            windows = (burn.long, burn.short)
            values = (pace.ttft_seconds, *windows) if ratio == "ttft_late" else windows
            yield Alert(
                name=name,
                expression=f"{long} and {short} and {enough}",
                lasts="0s",
                severity=burn.severity,
                summary=summary,
                description=description % values,
                labels={"burn": burn.name},
            )


def _fleet(pace: Pace) -> Iterator[Alert]:
    yield Alert(
        name="TandemNoWorkers",
        expression="min by (model) (tandem_fleet_model_ready) == 0",
        lasts=pace.lasts_briefly,
        severity="critical",
        summary="No worker serves {{ $labels.model }}",
        description="No usable worker has {{ $labels.model }}. Its requests fail.",
    )
    lost = 'tandem_events_total{kind="worker_lost"}'
    yield Alert(
        name="TandemWorkerLost",
        expression=f"max by (kind) ({increase_by(lost, pace)}) > 0",
        lasts="0s",
        severity="warning",
        summary="The fleet lost a worker",
        description=f"About {{{{ $value | humanize }}}} workers or KV services ended without a farewell in the last "
        f"{pace.event_window}, or their heartbeats stopped.",
    )
    yield Alert(
        name="TandemTargetDown",
        expression='up{job=~"tandem-.*"} == 0',
        lasts=pace.lasts_briefly,
        severity="warning",
        summary=f"The metrics of {_PROCESS} cannot be read",
        description=f"Prometheus gets no answer from {_PROCESS}. The process hangs, is gone, or its port is closed.",
    )
    yield Alert(
        name="TandemTargetDown",
        expression='absent(up{job="tandem-gateway"})',
        lasts=pace.lasts_briefly,
        severity="critical",
        summary="No gateway is monitored",
        description="Prometheus knows no gateway. Without a gateway's metrics no alert of requests can fire.",
    )
    yield Alert(
        name="TandemMigrations",
        expression=f"sum by (model) ({increase_by('tandem_migrations_total', pace)}) > {pace.max_migrations}",
        lasts="0s",
        severity="warning",
        summary="Streams of {{ $labels.model }} move between workers",
        description=f"About {{{{ $value | humanize }}}} requests to {{{{ $labels.model }}}} went on at another worker "
        f"in the last {pace.event_window}. No token is lost, but each move computes a prompt again.",
    )


def _capacity(pace: Pace) -> Iterator[Alert]:
    summary = "Requests to {{ $labels.model }} wait in the queue"
    yield Alert(
        name="TandemQueue",
        expression=f"{quantile(0.95, 'tandem_queue_wait_seconds', '', pace.window)} > {pace.max_wait_seconds:g}",
        lasts=pace.lasts,
        severity="warning",
        summary=summary,
        description="5 % of the requests to {{ $labels.model }} wait longer than {{ $value | humanizeDuration }}.",
        labels={"signal": "wait"},
    )
    yield Alert(
        name="TandemQueue",
        expression=f"sum by (model) (tandem_queue_length) > {pace.max_queue_length}",
        lasts=pace.lasts,
        severity="warning",
        summary=summary,
        description="{{ $value }} requests to {{ $labels.model }} wait. A full queue refuses with 429.",
        labels={"signal": "length"},
    )
    yield Alert(
        name="TandemRoutePrediction",
        expression=_prediction(pace),
        lasts=pace.lasts,
        severity="warning",
        summary="The router's predictions for {{ $labels.model }} are wrong",
        description="The median of actual / predicted time to the first token is {{ $value | humanize }}. "
        "The router then sends requests to workers that are not the fastest.",
    )
    for kind, share, means in _CACHE_PREDICTIONS:
        yield Alert(
            name="TandemCachePrediction",
            expression=_mispredicted(kind, share, pace),
            lasts=pace.lasts,
            severity="warning",
            summary="The router does not know the caches of {{ $labels.model }}",
            description=f"{{{{ $value | humanizePercentage }}}} of the prompt tokens were {means}. "
            "The router then sends requests past the workers that have their prefixes.",
            labels={"kind": kind},
        )


def _mispredicted(kind: str, share: float, pace: Pace) -> str:
    """Return the condition: a share of the prompt tokens, for enough requests."""
    wrong = f'sum by (model) (rate(tandem_cache_mispredicted_tokens_total{{kind="{kind}"}}[{pace.window}]))'
    prompts = f"sum by (model) (rate(tandem_cache_prompt_tokens_total[{pace.window}]))"
    decisions = f"sum by (model) (increase(tandem_route_decisions_total[{pace.window}]))"
    return f"{wrong} / {prompts} > {share:g} and {decisions} >= {pace.min_requests}"


def _prediction(pace: Pace) -> str:
    """Return the condition: wrong by a factor, and by enough seconds to matter, for enough requests."""
    ratio = quantile(0.5, "tandem_route_ttft_ratio", "", pace.window)
    actual, predicted, count = (
        f"sum by (model) (rate({each}[{pace.window}]))"
        for each in (
            "tandem_route_actual_ttft_seconds_total",
            "tandem_route_predicted_ttft_seconds_total",
            "tandem_route_ttft_ratio_count",
        )
    )
    return (
        f"({ratio} > {pace.prediction_factor} or {ratio} < {1 / pace.prediction_factor}) "
        f"and abs({actual} - {predicted}) / {count} > {_PREDICTION_SECONDS} "
        f"and sum by (model) (increase(tandem_route_ttft_ratio_count[{pace.window}])) >= {pace.min_requests}"
    )


def _processes(pace: Pace) -> Iterator[Alert]:
    by = "job, role, worker, instance"
    in_time = f'sum by ({by}) (rate(tandem_loop_lag_seconds_bucket{{le="{_LAG_SECONDS}"}}[{pace.window}]))'
    ticks = f"sum by ({by}) (rate(tandem_loop_lag_seconds_count[{pace.window}]))"
    yield Alert(
        name="TandemLoopLag",
        expression=f"1 - {in_time} / {ticks} > {pace.late_turns}",
        lasts=pace.lasts,
        severity="warning",
        summary=f"The event loop of {_PROCESS} stalls",
        description=f"{{{{ $value | humanizePercentage }}}} of the loop's turns are later than {_LAG_SECONDS} s. "
        "No token moves through this process meanwhile.",
    )
    yield Alert(
        name="TandemCertificateExpires",
        expression=f"tandem_certificate_expiration_time_seconds - time() < {pace.certificate_seconds}",
        lasts=pace.lasts_briefly,
        severity="warning",
        summary=f"The certificate of {_PROCESS} expires soon",
        description="It expires in {{ $value | humanizeDuration }} and was not renewed in time. "
        "Without a certificate the process is cut off from the fleet.",
    )
    yield Alert(
        name="TandemOrphanedKv",
        expression="max by (service, kind) (tandem_kv_orphan_bytes) > 0",
        lasts=pace.lasts_briefly,
        severity="warning",
        summary="{{ $labels.service }} keeps KV memory that nobody needs",
        description="{{ $value | humanize1024 }}B of KV memory ({{ $labels.kind }}) outlived every lease.",
    )


def _devices(pace: Pace) -> Iterator[Alert]:
    device = "device {{ $labels.device }} of {{ $labels.host_id }}"
    xid = increase_by("tandem_device_xid_errors_total", pace)
    yield Alert(
        name="TandemDeviceError",
        expression=f"max by (host_id, device, xid) ({xid}) > 0",
        lasts="0s",
        severity="critical",
        summary=f"XID {{{{ $labels.xid }}}} on {device}",
        description=f"The driver reported XID {{{{ $labels.xid }}}} on {device} in the last {pace.event_window}.",
        labels={"error": "xid"},
    )
    ecc = increase_by('tandem_device_ecc_errors_total{kind="uncorrected"}', pace)
    yield Alert(
        name="TandemDeviceError",
        expression=f"max by (host_id, device) ({ecc}) > 0",
        lasts="0s",
        severity="critical",
        summary=f"Uncorrected ECC errors on {device}",
        description=f"{{{{ $value | humanize }}}} memory errors on {device} could not be corrected. "
        "Bytes of weights or of KV blocks may be wrong.",
        labels={"error": "ecc"},
    )
    yield Alert(
        name="TandemDeviceThrottled",
        expression=f'max by (host_id, device, reason) (tandem_device_throttled{{reason=~"{_BAD_REASONS}"}}) > 0',
        lasts=pace.lasts,
        severity="warning",
        summary=f"Clocks of {device} are held down",
        description=f"{{{{ $labels.reason }}}} slows {device} down. Its steps take longer.",
    )

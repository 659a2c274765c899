"""Each alert fires when its figures say so, and ends when they end: unit tests of the rules, by promtool.

The minutes of a test are those of Prometheus' own clock, which begins at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.observability.alerts import alerts
from infra.observability.files import RULES
from infra.observability.pace import PRODUCTION
from tests.alerts.promtool import promtool

_ANSWER = 'gen_ai_operation_name="chat", gen_ai_request_model="m", gen_ai_response_model="m"'
_TTFT = "gen_ai_server_time_to_first_token_seconds"
_ENDED = "gen_ai_server_request_duration_seconds_count"
_WORKER = 'job="tandem-fleet", role="decode", worker="w", instance="h:1", host_id="h"'


@dataclass(frozen=True)
class Case:
    """An alert, the series that it reads (one value a minute), and the minutes at which it fires and does not."""

    alert: str
    series: Mapping[str, str]
    fires_at: Sequence[int]
    quiet_at: Sequence[int]
    labels: str = ""
    id: str = field(default="")


_LATE = {  # 60 requests a minute; the first tokens of 50 minutes are late
    f"{_ENDED}{{{_ANSWER}}}": "0+60x165",
    f"{_TTFT}_count{{{_ANSWER}}}": "0+60x165",
    f'{_TTFT}_bucket{{{_ANSWER}, le="2.048"}}': "0+60x60 3600+0x49 3600+60x55",
}
_FAILING = {  # 30 of 144 requests a minute fail for 40 minutes; callers' mistakes do not count
    f"{_ENDED}{{{_ANSWER}}}": "0+54x165",
    f'{_ENDED}{{{_ANSWER}, error_type="InternalError"}}': "0+0x60 0+30x40 1200+0x64",
    f'{_ENDED}{{{_ANSWER}, error_type="InvalidRequest"}}': "0+60x165",
}
_WAITS = {
    'tandem_queue_wait_seconds_bucket{model="m", le="0.5"}': "0+60x30 1800+0x20 1800+60x50",
    'tandem_queue_wait_seconds_bucket{model="m", le="8"}': "0+60x100",
    'tandem_queue_wait_seconds_bucket{model="m", le="+Inf"}': "0+60x100",
}


def _ratios(value: str) -> dict[str, str]:
    """Return a histogram of actual / predicted: near 1, in the bucket `value` for 20 minutes, near 1 again."""
    usual, odd = "0+60x30 1800+0x20 1800+60x50", "0+0x30 0+60x20 1200+0x50"
    below = {"0.25": "low", "1.5": "usual", "8": "high"}
    counts = {"low": "0+0x101", "usual": usual, "high": "0+60x100"}
    if value == "low":
        counts = {"low": odd, "usual": "0+60x100", "high": "0+60x100"}
    series = {f'tandem_route_ttft_ratio_bucket{{model="m", le="{le}"}}': counts[name] for le, name in below.items()}
    series['tandem_route_ttft_ratio_bucket{model="m", le="+Inf"}'] = "0+60x100"
    late = "0+6x30 180+60x20 1380+6x50" if value == "high" else "0+6x100"
    hasty = "0+6x30 180+60x20 1380+6x50" if value == "low" else "0+6x100"
    return {
        **series,
        'tandem_route_ttft_ratio_count{model="m"}': "0+60x100",
        'tandem_route_actual_ttft_seconds_total{model="m"}': late,
        'tandem_route_predicted_ttft_seconds_total{model="m"}': hasty,
    }


def _caches(kind: str, num_tokens: int) -> dict[str, str]:
    """Return 10,000 prompt tokens a minute, of which so many are mispredicted for 20 minutes."""
    return {
        'tandem_route_decisions_total{model="m", mode="local"}': "0+60x100",
        'tandem_cache_prompt_tokens_total{model="m"}': "0+10000x100",
        f'tandem_cache_mispredicted_tokens_total{{model="m", kind="{kind}"}}': (
            f"0+100x30 3000+{num_tokens}x20 {3000 + 20 * num_tokens}+100x50"
        ),
    }


_CASES = [
    Case("TandemTtftBudgetBurn", _LATE, [109, 110], [60, 90, 118, 160], 'burn="fast"'),
    Case("TandemTtftBudgetBurn", _LATE, [110, 120], [60, 150, 160], 'burn="slow"'),
    Case(
        "TandemTtftBudgetBurn",
        {name: values.replace("60x", "0.1x").replace("3600", "6") for name, values in _LATE.items()},
        [],
        [90, 110, 150],
        id="few requests are no alert",
    ),
    Case("TandemErrorBudgetBurn", _FAILING, [100], [60, 110, 160], 'burn="fast"'),
    Case("TandemErrorBudgetBurn", _FAILING, [100, 110], [60, 145, 160], 'burn="slow"'),
    Case(
        "TandemNoWorkers",
        {
            'tandem_fleet_model_ready{model="m", instance="g1"}': "1x10 0x10 1x10",
            'tandem_fleet_model_ready{model="n", instance="g1"}': "1x30",
        },
        [13, 20],
        [10, 23],
        'model="m"',
    ),
    Case(
        "TandemWorkerLost",
        {
            'tandem_events_total{kind="worker_lost", instance="g1"}': "_x20 1x60",
            'tandem_events_total{kind="worker_lost", instance="g2"}': "_x20 1x60",
            'tandem_events_total{kind="worker_left", instance="g1"}': "1+1x80",
        },
        [21, 30],
        [19, 40],
        id="the first loss",
    ),
    Case(
        "TandemWorkerLost",
        {'tandem_events_total{kind="worker_lost", instance="g1"}': "3x20 4x60"},
        [22, 30],
        [18, 40],
        id="another loss",
    ),
    Case(
        "TandemWorkerLost",
        {'tandem_events_total{kind="worker_lost", instance="g1"}': "3x20 stale _x3 3x60"},
        [],
        [19, 25, 35, 36, 37, 38, 39, 40],
        id="no loss, but scrapes that failed",
    ),
    Case("TandemTargetDown", {f"up{{{_WORKER}}}": "1x10 0x5 1x20"}, [13], [9, 18], 'severity="warning"'),
    Case(
        "TandemTargetDown",
        {'up{job="tandem-gateway", instance="g:1"}': "1x10 _x10 1x10"},
        [18],
        [9, 25],
        'severity="critical"',
        id="no gateway at all",
    ),
    Case(
        "TandemMigrations",
        {'tandem_migrations_total{model="m", cause="lost"}': "0x20 0+4x5 20x60"},
        [26, 30],
        [21, 45],
    ),
    Case("TandemQueue", _WAITS, [38, 50], [30, 34, 65], 'signal="wait"'),
    Case(
        "TandemQueue",
        {'tandem_queue_length{model="m", instance="g1"}': "0x10 40x20 0x20", 'tandem_queue_length{model="m"}': "30x50"},
        [17, 30],
        [10, 14, 33],
        'signal="length"',
    ),
    Case("TandemRoutePrediction", _ratios("high"), [40, 50], [30, 60], id="slower than predicted"),
    Case("TandemRoutePrediction", _ratios("low"), [40, 50], [30, 60], id="faster than predicted"),
    Case(
        "TandemRoutePrediction",
        {**_ratios("high"), 'tandem_route_actual_ttft_seconds_total{model="m"}': "0+7x100"},
        [],
        [40, 50],
        id="wrong by milliseconds only",
    ),
    Case("TandemCachePrediction", _caches("missing", 2_500), [44, 50], [30, 60], 'kind="missing"', id="not found"),
    Case("TandemCachePrediction", _caches("unexpected", 2_500), [], [44, 50], id="found between two sample points"),
    Case("TandemCachePrediction", _caches("unexpected", 6_000), [44, 50], [30, 60], 'kind="unexpected"', id="found"),
    Case(
        "TandemCachePrediction",
        {**_caches("missing", 2_500), 'tandem_route_decisions_total{model="m", mode="local"}': "0+3x100"},
        [],
        [40, 50],
        id="few requests",
    ),
    Case(
        "TandemLoopLag",
        {
            f'tandem_loop_lag_seconds_bucket{{{_WORKER}, le="0.05"}}': "0+3000x20 60000+2900x20 118000+3000x40",
            f"tandem_loop_lag_seconds_count{{{_WORKER}}}": "0+3000x80",
        },
        [30, 40],
        [20, 24, 48],
    ),
    Case(
        "TandemCertificateExpires",
        {f"tandem_certificate_expiration_time_seconds{{{_WORKER}}}": "22000x20 108400x40"},
        [9, 20],
        [6, 23],
    ),
    Case(
        "TandemOrphanedKv",
        {'tandem_kv_orphan_bytes{service="kv-0", kind="owner_gone", instance="g1"}': "0x10 4096x10 0x10"},
        [12, 20],
        [10, 23],
    ),
    Case(
        "TandemDeviceError",
        {f'tandem_device_xid_errors_total{{{_WORKER}, device="0", xid="79"}}': "_x10 1x60"},
        [11, 20],
        [9, 30],
        'error="xid"',
    ),
    Case(
        "TandemDeviceError",
        {
            f'tandem_device_ecc_errors_total{{{_WORKER}, device="0", kind="uncorrected"}}': "0x20 2x60",
            f'tandem_device_ecc_errors_total{{{_WORKER}, device="0", kind="corrected"}}': "0+1x80",
        },
        [22, 30],
        [19, 40],
        'error="ecc"',
    ),
    Case(
        "TandemDeviceThrottled",
        {
            f'tandem_device_throttled{{{_WORKER}, device="0", reason="hw_thermal_slowdown"}}': "0x10 1x20 0x20",
            f'tandem_device_throttled{{{_WORKER}, device="0", reason="sw_power_cap"}}': "1x50",
        },
        [17, 30],
        [10, 14, 33],
    ),
]


@pytest.mark.services
@pytest.mark.parametrize("case", _CASES, ids=lambda case: f"{case.alert} {case.id or case.labels}")
def test_an_alert_fires_while_its_cause_lasts_and_ends_after_it(case: Case, tmp_path: Path) -> None:
    firing = f'count(ALERTS{{alertname="{case.alert}", alertstate="firing", {case.labels}}})'
    checks = [{"eval_time": f"{minute}m", "expr": firing, "exp_samples": [_ONE]} for minute in case.fires_at]
    checks += [{"eval_time": f"{minute}m", "expr": firing, "exp_samples": []} for minute in case.quiet_at]
    _run(case.series, checks, tmp_path)


_ONE: dict[str, Any] = {"labels": "{}", "value": 1}


def _run(series: Mapping[str, str], checks: Sequence[Mapping[str, Any]], folder: Path) -> None:
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": list(checks),
    }
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    (folder / "tests.yml").write_text(yaml.safe_dump(document))
    promtool(["test", "rules", "tests.yml"], folder)


def test_every_alert_has_a_unit_test() -> None:
    assert {case.alert for case in _CASES if case.fires_at} == {alert.name for alert in alerts(PRODUCTION)}


@pytest.mark.services
def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    series = {'tandem_kv_orphan_bytes{service="kv-0", kind="owner_gone"}': "0x30"}
    check = {"eval_time": "20m", "expr": 'count(ALERTS{alertname="TandemOrphanedKv"})', "exp_samples": [_ONE]}
    with pytest.raises(AssertionError, match="TandemOrphanedKv"):
        _run(series, [check], tmp_path)

"""The recording and alerting rules: objectives, burn rates, and one rule for each alert's condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from infra.observability.alerts import Alert, alerts
from infra.observability.expressions import FAULTS, boundary, by_model, share
from infra.observability.pace import Pace

Group = dict[str, Any]

TTFT_OBJECTIVE = 0.95
"""Share of requests whose first token is in time."""
SUCCESS_OBJECTIVE = 0.995
"""Share of requests that no fault of ours ends."""

_TTFT = "gen_ai_server_time_to_first_token_seconds"
_REQUESTS = "gen_ai_server_request_duration_seconds_count"


def groups(pace: Pace) -> list[Group]:
    """Return the groups of a rules file, in its form."""
    return [
        {"name": "tandem-objectives", "rules": list(_objectives())},
        {"name": "tandem-budgets", "rules": list(_budgets(pace))},
        {"name": "tandem-alerts", "rules": [_alerting(alert) for alert in alerts(pace)]},
    ]


def expressions(groups: Sequence[Group]) -> list[str]:
    """Return the expression of every rule."""
    return [rule["expr"] for group in groups for rule in group["rules"]]


def _objectives() -> Iterator[dict[str, Any]]:
    yield {"record": "tandem:ttft_objective:ratio", "expr": f"vector({TTFT_OBJECTIVE})"}
    yield {"record": "tandem:success_objective:ratio", "expr": f"vector({SUCCESS_OBJECTIVE})"}


def _budgets(pace: Pace) -> Iterator[dict[str, Any]]:
    """Yield, for each window, the share of the budget's requests that went wrong."""
    in_time = f'{_TTFT}_bucket{{le="{boundary(pace.ttft_seconds)}"}}'
    for window in dict.fromkeys(each for burn in pace.burns for each in (burn.short, burn.long)):
        late = f"1 - {share(in_time, f'{_TTFT}_count', window)}"
        yield {"record": f"tandem:ttft_late:ratio_rate{window}", "expr": late}
        failed = share(f'{_REQUESTS}{{error_type=~"{FAULTS}"}}', _REQUESTS, window)
        yield {"record": f"tandem:request_faults:ratio_rate{window}", "expr": failed}
    for burn in pace.burns:
        yield {
            "record": f"tandem:requests:increase{burn.long}",
            "expr": by_model(f"increase({_REQUESTS}[{burn.long}])"),
        }


def _alerting(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity, **alert.labels},
        "annotations": {"summary": alert.summary, "description": alert.description, "runbook": alert.runbook},
    }

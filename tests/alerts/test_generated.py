"""What is generated is current, is valid, and names what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.observability.alerts import RUNBOOKS, alerts
from infra.observability.files import COMPOSE, CONFIG, DASHBOARDS, KUBERNETES_RULES, RULES, boards, files
from infra.observability.pace import PRODUCTION, SHORT
from infra.observability.rules import expressions, groups
from infra.observability.scraping import Scraping
from tandem_runtime.settings import fields_of
from tests.alerts.names import all_expressions, documented_names, filled, metric_names, recorded_names
from tests.alerts.promtool import promtool
from tests.docs.markdown import ROOT
from tests.infra.commands import SERVICES

_OF_PROMETHEUS = {"up", "ALERTS"}
_HEADINGS = ["What it means", "What to look at", "What to do, in this order", "Followed once"]


def test_generated_files_are_current() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in files().items() if path.read_text() != text]
    assert stale == [], "run python -m infra.observability"


@pytest.mark.services
@pytest.mark.parametrize("pace", [PRODUCTION, SHORT], ids=["production", "short"])
def test_prometheus_takes_the_rules(tmp_path: Path, pace: Any) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups(pace)}))
    assert f"{len(expressions(groups(pace)))} rules found" in promtool(["check", "rules", "rules.yml"], tmp_path)


@pytest.mark.services
def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    for name in ("operator-token", "bundle.pem"):
        (tmp_path / name).write_text("")
    text = CONFIG.read_text().replace("/etc/prometheus/", f"{RULES.parent}/")
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/tandem-observability/", f"{tmp_path}/"))
    assert "SUCCESS" in promtool(["check", "config", "prometheus.yml"], tmp_path)


def test_the_configuration_without_accounts_and_certificates_has_neither_token_nor_authority() -> None:
    config = Scraping(["127.0.0.1:8642"], ["rules.yml"]).config()
    assert not re.search(r"authorization|tls_config", json.dumps(config))
    [gateway, fleet] = COMPOSE.config()["scrape_configs"]
    assert gateway["authorization"] == fleet["http_sd_configs"][0]["authorization"]
    assert fleet["tls_config"]["server_name"] == "metrics.tandem.internal"


def test_kubernetes_has_the_same_rules() -> None:
    [plain, custom] = [yaml.safe_load(path.read_text()) for path in (RULES, KUBERNETES_RULES)]
    assert custom["spec"]["groups"] == plain["groups"]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (le) (rate(a_bucket{b=~"c(d|e)"}[5m])) > 2', {"a_bucket"}),
        ("up == 0 unless on (x) a:b:rate5m offset 5m", {"up", "a:b:rate5m"}),
        ('label_replace(rate(a[5m]), "model", "$1", "b", "(.*)") / ignoring (tier) group_left () sum(c)', {"a", "c"}),
        ("1 - vector(0.95)", set()),
    ],
)
def test_the_names_of_an_expression_are_found(expression: str, names: set[str]) -> None:
    assert metric_names(expression) == names


def test_every_name_is_on_the_page_of_metrics_or_is_recorded() -> None:
    known = documented_names() | recorded_names() | _OF_PROMETHEUS
    used = set().union(*(metric_names(filled(each)) for each in all_expressions()))
    assert sorted(used - known) == []
    assert len(used) > 60


def test_the_metrics_that_the_dashboards_leave_out_are_few_and_named() -> None:
    used = set().union(*(metric_names(filled(each)) for each in all_expressions()))
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in used}
    left_out = {re.sub(r"_(bucket|count|sum)$", "", name) for name in documented_names()} - bases
    assert left_out == _LEFT_OUT


_LEFT_OUT = {
    "target_info",
    "tandem_fleet_models",  # tandem_fleet_model_ready has the same by model
    "tandem_kv_audit_left_out",
    "tandem_kv_link_bytes_total",
    "tandem_kv_link_is_impaired",
    "tandem_kv_link_latency_seconds",
    "tandem_kv_link_transfers_total",
    "tandem_kv_store_corrupt_total",
    "tandem_kv_store_refused_total",
    "tandem_worker_draft_tokens_accepted_total",
    "tandem_worker_draft_tokens_total",
    "tandem_worker_encoded_inputs_total",
    "tandem_worker_encoded_tokens_total",
    "tandem_worker_import_size_bytes_total",
    "tandem_worker_kv_blocks",  # tandem_worker_kv_size_bytes has the same in bytes
    "tandem_worker_longest_answer_step_seconds",
    "tandem_worker_longest_commands_seconds",
    "tandem_worker_longest_copy_cpu_seconds",
    "tandem_worker_longest_copy_seconds",
    "tandem_worker_steps_total",
}


def test_every_dashboard_has_its_variables_and_panels_of_its_own_number() -> None:
    made = [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]
    assert {each["uid"] for each in made} == {board.uid for board in boards()}
    for dashboard in made:
        variables = [each["name"] for each in dashboard["templating"]["list"]]
        assert variables == ["datasource", "model", "role"]
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(numbers)) == len(numbers)
        text = json.dumps(dashboard["panels"])
        assert "$model" in text and "$role" in text, dashboard["uid"]
        panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
        assert all(panel["description"] and panel["datasource"]["uid"] == "${datasource}" for panel in panels)
        for panel in panels:
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)


def test_every_alert_has_a_severity_texts_and_a_runbook_with_its_name() -> None:
    found = {ROOT / alert.runbook: alert.name for alert in alerts(PRODUCTION)}
    assert set(found) == set((ROOT / RUNBOOKS).glob("*.md"))
    for path, name in found.items():
        assert path.read_text().startswith(f"# {name}\n")
        assert re.findall(r"^## (.*)$", path.read_text(), re.MULTILINE) == _HEADINGS
        assert re.search(r"^20\d\d-\d\d-\d\d", path.read_text().split("## Followed once\n\n")[1]), path.name
    for alert in alerts(PRODUCTION):
        assert alert.severity in ("critical", "warning")
        assert alert.summary and alert.description


def test_the_flags_in_runbooks_are_those_of_the_services() -> None:
    known = {field.flag for service, settings in SERVICES.values() for field in fields_of(settings, service)}
    others = {"--role", "--pid", "--power-limit"}
    used = {
        flag
        for path in (ROOT / RUNBOOKS).glob("*.md")
        for flag in re.findall(r"`[^`]*?(--[a-z][a-z-]+)", path.read_text())
    }
    assert sorted(used - known - others) == []

"""Builds panels, rows and variables in one style, with the types of Grafana's Foundation SDK."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh, VariableSort

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RATE = "$__rate_interval"
MODEL = 'model=~"$model"'
ANSWERED = 'gen_ai_response_model=~"$model"'
"""The model's label in the metrics that OpenTelemetry names."""
ROLE = 'role=~"$role"'

_GRAPH_WIDTH, _GRAPH_HEIGHT = 8, 8
_STAT_WIDTH, _STAT_HEIGHT = 4, 4
_FILL_OPACITY = 12

Query = tuple[str, str]
"""A PromQL expression and the legend of its series."""


@dataclass(frozen=True)
class PanelSpec:
    """A panel: `question` is what it answers, in one sentence; `unit` is Grafana's name of a unit."""

    title: str
    question: str
    unit: str
    queries: Sequence[Query]
    is_stat: bool = False
    is_stacked: bool = False


@dataclass(frozen=True)
class RowSpec:
    title: str
    panels: Sequence[PanelSpec]


@dataclass(frozen=True)
class BoardSpec:
    """A dashboard; `uid` is also the name of its file."""

    uid: str
    title: str
    description: str
    rows: Sequence[RowSpec]

    @property
    def panels(self) -> list[PanelSpec]:
        return [panel for row in self.rows for panel in row.panels]


def graph(title: str, question: str, unit: str, *queries: Query, stacked: bool = False) -> PanelSpec:
    return PanelSpec(title, question, unit, queries, is_stacked=stacked)


def figure(title: str, question: str, unit: str, query: str) -> PanelSpec:
    """Return a panel with one number."""
    return PanelSpec(title, question, unit, [(query, "")], is_stat=True)


def build(board: BoardSpec) -> dashboard.Dashboard:
    """Return the builder of a dashboard, with the variables `datasource`, `model` and `role`."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["tandem"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("model", "Model", "label_values(tandem_fleet_model_ready, model)"))
        .with_variable(_variable("role", "Role", 'label_values(up{job=~"tandem-.*"}, role)'))
        .link(dashboard.DashboardLink("Tandem").tags(["tandem"]).as_dropdown(True).include_vars(True).keep_time(True))
    )
    number = 0
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(1000 + number))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_stat(panel, number) if panel.is_stat else _graph(panel, number))
    return made


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _targets(panel: PanelSpec) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(expression).legend_format(legend or "__auto").ref_id(letter).datasource(SOURCE)
        for letter, (expression, legend) in zip(ascii_uppercase, panel.queries, strict=False)
    ]


def _graph(panel: PanelSpec, number: int) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    made = (
        timeseries.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.question)
        .unit(panel.unit)
        .min(0)
        .datasource(SOURCE)
        .height(_GRAPH_HEIGHT)
        .span(_GRAPH_WIDTH)
        .fill_opacity(_FILL_OPACITY)
        .legend(legend.display_mode(LegendDisplayMode.LIST))
        .tooltip(tooltip)
    )
    if panel.is_stacked:
        made = made.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for target in _targets(panel):
        made = made.with_target(target)
    return made


def _stat(panel: PanelSpec, number: int) -> stat.Panel:
    [target] = _targets(panel)
    return (
        stat.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.question)
        .unit(panel.unit)
        .datasource(SOURCE)
        .height(_STAT_HEIGHT)
        .span(_STAT_WIDTH)
        .orientation(VizOrientation.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .with_target(target)
    )

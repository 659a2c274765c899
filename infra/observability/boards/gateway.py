"""The inside of a gateway: event loops, routes, text processes, HTTP."""

from __future__ import annotations

from infra.observability.expressions import quantile
from infra.observability.panels import MODEL, RATE, ROLE, BoardSpec, RowSpec, graph
from infra.observability.queries import PROCESS, percentiles, rate


def board() -> BoardSpec:
    return BoardSpec(
        "tandem-gateway",
        "Tandem: gateway internals",
        "Event loops, routes, text processes and HTTP.",
        [_loops(), _routes(), _text(), _http()],
    )


def _loops() -> RowSpec:
    return RowSpec(
        "Event loops",
        [
            graph(
                "Loop lag, 99th percentile",
                "Which processes stall? No token moves while a loop stalls.",
                "s",
                (quantile(0.99, "tandem_loop_lag_seconds", ROLE, RATE, "role, worker, instance"), PROCESS),
            ),
            graph(
                "Background failures",
                "Which background loops were restarted?",
                "short",
                (rate("tandem_background_failures_total", ROLE, "role, tandem_task"), "{{role}} {{tandem_task}}"),
            ),
            graph(
                "Processor of gateways",
                "How much room does each gateway's event loop have? It has one core.",
                "percentunit",
                (f'rate(process_cpu_time_seconds_total{{role="gateway"}}[{RATE}])', "{{instance}}"),
            ),
        ],
    )


def _per_route(role: str) -> str:
    candidates = rate("tandem_route_candidates_total", f'{MODEL}, role="{role}"', "model")
    return f"{candidates} / {rate('tandem_route_decisions_total', MODEL, 'model')}"


def _routes() -> RowSpec:
    return RowSpec(
        "Routes",
        [
            graph(
                "Routes",
                "How many prompts are handed over, and how many does decode read itself?",
                "reqps",
                (rate("tandem_route_decisions_total", MODEL, "model, mode"), "{{model}} {{mode}}"),
            ),
            graph(
                "Candidates",
                "How many workers of each role does the router compare for a route?",
                "short",
                (_per_route("prefill"), "prefill {{model}}"),
                (_per_route("decode"), "decode {{model}}"),
            ),
            graph(
                "Predicted and actual TTFT",
                "Are the router's predictions right on average?",
                "s",
                (
                    f"{rate('tandem_route_predicted_ttft_seconds_total', MODEL, 'model')} / "
                    f"{rate('tandem_route_decisions_total', MODEL, 'model')}",
                    "predicted {{model}}",
                ),
                (
                    f"{rate('tandem_route_actual_ttft_seconds_total', MODEL, 'model')} / "
                    f"{rate('tandem_route_decisions_total', MODEL, 'model')}",
                    "actual {{model}}",
                ),
            ),
            graph(
                "Actual / predicted",
                "How far apart are prediction and truth of single requests?",
                "short",
                *percentiles("tandem_route_ttft_ratio", MODEL),
            ),
        ],
    )


def _text() -> RowSpec:
    return RowSpec(
        "Text processes",
        [
            graph(
                "Wait for a text process",
                "Are there enough text processes?",
                "s",
                *percentiles("tandem_text_queue_duration_seconds", "", "tandem_text_lane", "{{tandem_text_lane}}"),
            ),
            graph(
                "Time of a body",
                "How long does a text process check, render and tokenize one body?",
                "s",
                *percentiles("tandem_text_duration_seconds", "", "tandem_text_lane", "{{tandem_text_lane}}"),
            ),
            graph(
                "Bodies that wait",
                "How many bodies wait, and how many text processes had to be ended?",
                "short",
                ("sum by (tandem_text_lane) (tandem_text_waiting)", "{{tandem_text_lane}}"),
                (
                    f"sum by (tandem_text_reason) (rate(tandem_text_kills_total[{RATE}]))",
                    "ended: {{tandem_text_reason}}",
                ),
            ),
        ],
    )


def _http() -> RowSpec:
    return RowSpec(
        "HTTP",
        [
            graph(
                "Answers",
                "Which status codes do clients get?",
                "reqps",
                (
                    f"sum by (http_response_status_code) (rate(http_server_request_duration_seconds_count[{RATE}]))",
                    "{{http_response_status_code}}",
                ),
            ),
            graph(
                "Duration",
                "How long do answers take, all endpoints?",
                "s",
                *percentiles(
                    "http_server_request_duration_seconds", "", "http_request_method", "{{http_request_method}}"
                ),
            ),
            graph(
                "Refused by limits",
                "Which limits of the HTTP server refuse connections and requests?",
                "short",
                (f"sum by (reason) (rate(tandem_http_refusals_total[{RATE}]))", "{{reason}}"),
            ),
        ],
    )

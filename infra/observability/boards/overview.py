"""The overview: what clients see."""

from __future__ import annotations

from infra.observability.expressions import FAULTS, boundary
from infra.observability.pace import PRODUCTION
from infra.observability.panels import ANSWERED, MODEL, RATE, ROLE, BoardSpec, RowSpec, figure, graph
from infra.observability.queries import percentiles, rate

_TTFT = "gen_ai_server_time_to_first_token_seconds"
_DURATION = "gen_ai_server_request_duration_seconds"
_ENDED = f"{_DURATION}_count"
_BY = "gen_ai_response_model"
_LEGEND = "{{gen_ai_response_model}}"
_FAILED = f'{_ENDED}{{{ANSWERED}, error_type=~"{FAULTS}"}}'
_IN_TIME = f'{_TTFT}_bucket{{{ANSWERED}, le="{boundary(PRODUCTION.ttft_seconds)}"}}'


def board() -> BoardSpec:
    return BoardSpec(
        "tandem-overview",
        "Tandem: overview",
        "Latency, throughput, errors and queue, as clients see them.",
        [_now(), _latency(), _throughput(), _errors()],
    )


def _now() -> RowSpec:
    return RowSpec(
        "Now",
        [
            figure("Requests", "Requests that end per second.", "reqps", f"sum(rate({_ENDED}{{{ANSWERED}}}[{RATE}]))"),
            figure(
                "Output tokens",
                "Tokens per second that clients get.",
                "short",
                f'sum(rate(tandem_tokens_total{{{MODEL}, type="output"}}[{RATE}]))',
            ),
            figure(
                "TTFT, 95th percentile",
                "95 % of first tokens leave within this time.",
                "s",
                f"histogram_quantile(0.95, sum by (le) (rate({_TTFT}_bucket{{{ANSWERED}}}[{RATE}])))",
            ),
            figure(
                "Faults",
                "Share of requests that end with an error of ours.",
                "percentunit",
                f"sum(rate({_FAILED}[{RATE}])) / sum(rate({_ENDED}{{{ANSWERED}}}[{RATE}]))",
            ),
            figure("Queue", "Requests that wait for a worker.", "short", f"sum(tandem_queue_length{{{MODEL}}})"),
            figure(
                "Workers",
                "Workers and KV services that are ready, as a gateway sees them.",
                "short",
                f'sum(max by (role) (tandem_fleet_workers{{{ROLE}, state="ready"}}))',
            ),
        ],
    )


def _latency() -> RowSpec:
    return RowSpec(
        "Latency",
        [
            graph(
                "Time to first token",
                "How long do clients wait for the first token?",
                "s",
                *percentiles(_TTFT, ANSWERED, _BY, _LEGEND),
            ),
            graph(
                "Inter-token latency",
                "How long are the gaps between two tokens of a stream?",
                "s",
                *percentiles("tandem_inter_token_latency_seconds", MODEL),
            ),
            graph(
                "Request duration",
                "How long does a whole answer take?",
                "s",
                *percentiles(_DURATION, ANSWERED, _BY, _LEGEND),
            ),
            graph(
                "Time per output token",
                "What is the mean gap of a request?",
                "s",
                *percentiles("gen_ai_server_time_per_output_token_seconds", ANSWERED, _BY, _LEGEND),
            ),
            graph(
                "Late first tokens",
                "Is the TTFT objective kept? The budget is the share that may be late.",
                "percentunit",
                (f"1 - sum(rate({_IN_TIME}[{RATE}])) / sum(rate({_TTFT}_count{{{ANSWERED}}}[{RATE}]))", "late"),
                ("1 - tandem:ttft_objective:ratio", "budget"),
            ),
            graph(
                "Burn of the TTFT budget",
                "How fast does the error budget of TTFT burn, by model? 1 uses it up exactly.",
                "short",
                (
                    f"tandem:ttft_late:ratio_rate1h{{{MODEL}}} / (1 - scalar(tandem:ttft_objective:ratio))",
                    "1 h {{model}}",
                ),
                (
                    f"tandem:ttft_late:ratio_rate6h{{{MODEL}}} / (1 - scalar(tandem:ttft_objective:ratio))",
                    "6 h {{model}}",
                ),
            ),
        ],
    )


def _throughput() -> RowSpec:
    return RowSpec(
        "Throughput",
        [
            graph(
                "Requests",
                "Which models are asked, and how often?",
                "reqps",
                (rate(_ENDED, ANSWERED, _BY), _LEGEND),
            ),
            graph(
                "Tokens",
                "How many tokens are computed, found in caches, and written?",
                "short",
                (rate("tandem_tokens_total", MODEL, "type"), "{{type}}"),
            ),
            graph(
                "Requests that run",
                "How many requests are between admission and end?",
                "short",
                (f"sum by (model) (tandem_requests_running{{{MODEL}}})", "{{model}}"),
            ),
        ],
    )


def _errors() -> RowSpec:
    return RowSpec(
        "Errors and queue",
        [
            graph(
                "Errors",
                "Which errors end requests?",
                "reqps",
                (rate(_ENDED, f'{ANSWERED}, error_type!=""', "error_type"), "{{error_type}}"),
            ),
            graph(
                "Refusals",
                "How many generations end with an error, by its class, also without a known model?",
                "reqps",
                (f"sum by (cause) (rate(tandem_refusals_total[{RATE}]))", "{{cause}}"),
            ),
            graph(
                "Burn of the error budget",
                "How fast does the error budget burn, by model? 1 uses it up exactly.",
                "short",
                (
                    f"tandem:request_faults:ratio_rate1h{{{MODEL}}} / (1 - scalar(tandem:success_objective:ratio))",
                    "1 h {{model}}",
                ),
                (
                    f"tandem:request_faults:ratio_rate6h{{{MODEL}}} / (1 - scalar(tandem:success_objective:ratio))",
                    "6 h {{model}}",
                ),
            ),
            graph(
                "Queue",
                "How many requests wait for a worker?",
                "short",
                (f"sum by (model) (tandem_queue_length{{{MODEL}}})", "{{model}}"),
            ),
            graph(
                "Waiting, by class",
                "How many requests of each class wait for room?",
                "short",
                (f"sum by (model, class) (tandem_admission_waiting{{{MODEL}}})", "{{model}} {{class}}"),
            ),
            graph(
                "Granted",
                "How many requests may the gateways still send, by the workers' grants?",
                "short",
                (f"sum by (model, role) (tandem_admission_granted{{{MODEL}}})", "{{model}} {{role}}"),
            ),
            graph(
                "Accounts that wait",
                "How many accounts share what is left, at each gateway?",
                "short",
                (f"sum by (model, class) (tandem_admission_accounts{{{MODEL}}})", "{{model}} {{class}}"),
            ),
            graph(
                "Counters apart",
                "How much device time lies between the accounts that wait?",
                "s",
                (f"max by (model, class) (tandem_admission_counter_spread_seconds{{{MODEL}}})", "{{model}} {{class}}"),
            ),
            graph(
                "Predicted wait",
                "How long would a request wait that comes now?",
                "s",
                (f"max by (model) (tandem_admission_predicted_wait_seconds{{{MODEL}}})", "{{model}}"),
            ),
            graph(
                "Refused for lack of room",
                "Why are requests refused?",
                "short",
                (rate("tandem_admission_refusals_total", MODEL, "cause"), "{{cause}}"),
            ),
            graph(
                "Queue wait",
                "How long do requests wait for a worker?",
                "s",
                *percentiles("tandem_queue_wait_seconds", MODEL),
            ),
            graph(
                "Migrations",
                "How many requests go on at another worker, and why?",
                "short",
                (rate("tandem_migrations_total", MODEL, "cause"), "{{cause}}"),
            ),
        ],
    )

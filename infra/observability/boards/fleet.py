"""Workers, processes, and the devices that they use."""

from __future__ import annotations

from infra.observability.panels import MODEL, RATE, ROLE, BoardSpec, RowSpec, graph
from infra.observability.queries import DEVICE, PROCESS, WORKER, of_device, rate


def board() -> BoardSpec:
    return BoardSpec(
        "tandem-fleet",
        "Tandem: fleet and devices",
        "Workers, processes, and the devices that they use.",
        [_workers(), _processes(), _devices()],
    )


def _workers() -> RowSpec:
    return RowSpec(
        "Workers",
        [
            graph(
                "Workers by state",
                "Which workers are ready, draining, suspected or apart?",
                "short",
                (f"max by (role, state) (tandem_fleet_workers{{{ROLE}}})", "{{role}} {{state}}"),
            ),
            graph(
                "Workers by health",
                "Which workers do requests find sick, and which are tried again?",
                "short",
                (f"max by (role, health) (tandem_fleet_worker_health{{{ROLE}}})", "{{role}} {{health}}"),
            ),
            graph(
                "Ejections",
                "How many workers were taken out because requests found them sick?",
                "short",
                (
                    f"sum by (role, cause) (increase(tandem_fleet_ejections_total{{{ROLE}}}[{RATE}]))",
                    "{{role}} {{cause}}",
                ),
            ),
            graph(
                "Seams",
                "How many answers went on in another numerics class?",
                "short",
                (f"sum by (model) (increase(tandem_class_seams_total{{{MODEL}}}[{RATE}]))", "{{model}}"),
            ),
            graph(
                "Models with a worker",
                "Which models can be served? 0 is a model without a usable worker.",
                "short",
                (f"min by (model) (tandem_fleet_model_ready{{{MODEL}}})", "{{model}}"),
            ),
            graph(
                "Events",
                "What does the fleet decide? GET /v1/events has the same with reasons.",
                "short",
                (f"sum by (kind) (increase(tandem_events_total[{RATE}]))", "{{kind}}"),
            ),
            graph(
                "Requests in engines",
                "Which workers have requests that run, and requests that wait?",
                "short",
                (f"sum by (role, worker, state) (tandem_worker_requests{{{ROLE}}})", f"{WORKER} {{{{state}}}}"),
            ),
            graph(
                "Load of engines",
                "Which share of its time does an engine compute?",
                "percentunit",
                (rate("tandem_worker_step_duration_seconds_total", ROLE, "role, worker"), WORKER),
            ),
            graph(
                "Tokens of workers",
                "How many tokens per second does each worker compute and sample?",
                "short",
                (rate("tandem_worker_prompt_tokens_computed_total", ROLE, "role, worker"), f"{WORKER} prompt"),
                (rate("tandem_worker_tokens_generated_total", ROLE, "role, worker"), f"{WORKER} generated"),
            ),
            graph(
                "Encode workers",
                "How many calls do encode workers answer, and how do the calls end?",
                "short",
                (rate("tandem_worker_calls_total", ROLE, "worker, outcome"), "{{worker}} {{outcome}}"),
            ),
        ],
    )


def _processes() -> RowSpec:
    return RowSpec(
        "Processes",
        [
            graph(
                "Scraped",
                "Which processes answer Prometheus? 0 is a process that hangs or is gone.",
                "short",
                (f'up{{job=~"tandem-.*", {ROLE}}}', PROCESS),
            ),
            graph(
                "Processor",
                "How many cores does each process use?",
                "short",
                (f"rate(process_cpu_time_seconds_total{{{ROLE}}}[{RATE}])", PROCESS),
            ),
            graph(
                "Memory",
                "How much memory does each process hold?",
                "bytes",
                (f"process_memory_usage_bytes{{{ROLE}}}", PROCESS),
            ),
            graph(
                "Age",
                "When did each process start? A line that falls to 0 is a restart.",
                "s",
                (f"time() - tandem_process_start_time_seconds{{{ROLE}}}", PROCESS),
            ),
            graph(
                "Certificates",
                "How long are certificates still valid? Each is renewed after half of its time.",
                "s",
                (f"tandem_certificate_expiration_time_seconds{{{ROLE}}} - time()", PROCESS),
            ),
        ],
    )


def _devices() -> RowSpec:
    return RowSpec(
        "Devices",
        [
            graph(
                "Device memory by owner",
                "Who holds the memory of each device?",
                "bytes",
                (
                    f'sum by (host_id, device) (tandem_device_memory_bytes{{{ROLE}, owner="tandem"}})',
                    f"{DEVICE} tandem",
                ),
                (of_device(f'tandem_device_memory_bytes{{{ROLE}, owner="foreign"}}'), f"{DEVICE} foreign"),
                (of_device(f'tandem_device_memory_bytes{{{ROLE}, owner="free"}}'), f"{DEVICE} free"),
            ),
            graph(
                "Utilization",
                "Which share of its time does each device compute?",
                "percentunit",
                (of_device(f"tandem_device_utilization{{{ROLE}}}"), DEVICE),
            ),
            graph(
                "Power",
                "How much power does each device draw?",
                "watt",
                (of_device(f"tandem_device_power_watts{{{ROLE}}}"), DEVICE),
            ),
            graph(
                "Energy",
                "How many joules per second does each device take, by its own counter?",
                "watt",
                (of_device(f"rate(tandem_device_energy_joules_total{{{ROLE}}}[{RATE}])"), DEVICE),
            ),
            graph(
                "Energy per token",
                "What does a token cost, by phase?",
                "joule",
                (
                    of_device(f"tandem_device_energy_per_token_joules{{{ROLE}}}", "host_id, device, phase"),
                    f"{DEVICE} {{{{phase}}}}",
                ),
            ),
            graph(
                "Temperature",
                "Which devices are hot?",
                "celsius",
                (of_device(f"tandem_device_temperature_celsius{{{ROLE}}}"), DEVICE),
            ),
            graph(
                "Throttling",
                "Which clocks are held down, and why?",
                "short",
                (
                    of_device(f"tandem_device_throttled{{{ROLE}}}", "host_id, device, reason"),
                    f"{DEVICE} {{{{reason}}}}",
                ),
            ),
            graph(
                "Silence of NVML",
                "Which workers' driver hangs?",
                "s",
                (f"max by (host_id, worker) (tandem_device_silence_seconds{{{ROLE}}})", WORKER),
            ),
            graph(
                "Device errors",
                "Which devices report XID or ECC errors?",
                "short",
                (
                    of_device(f"tandem_device_xid_errors_total{{{ROLE}}}", "host_id, device, xid"),
                    f"{DEVICE} XID {{{{xid}}}}",
                ),
                (
                    of_device(f"tandem_device_ecc_errors_total{{{ROLE}}}", "host_id, device, kind"),
                    f"{DEVICE} ECC {{{{kind}}}}",
                ),
            ),
        ],
    )

"""The kinds of events: the one table for the code, the documentation and the page's filter.

An event is a line of the gateway's log whose name is in this table, or comes from the two sources beside the log:
workers (`worker_watch.py`) and requests (`request_watch.py`).

Lines of the log may come thousands of times a second, and some are caused by strangers. Of each kind and cause a few
are events of their own in a window; the others are one event with their number (`repetitions.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
Source = Literal["log", "workers", "requests"]


@dataclass(frozen=True)
class Kind:
    name: str
    """Of the event; from the log, also the name of the line."""
    severity: Severity
    message: str
    """A sentence. `{field}` stands for a field of the event; a field that is missing leaves nothing.

    `{worker}` and `{to}` are names of workers, `{what}` is "decode worker" or "KV service".
    """
    cause: str = ""
    """The field that holds the cause: a word of a bounded set, such as an error's class name."""
    source: Source = "log"
    window_seconds: float = 10.0
    """How long lines of the log are summed."""
    per_window: int = 20
    """Lines of a window that are events of their own."""
    highest: str = ""
    """The field of which a sum shows the greatest value; the other fields are those of the last line."""


_ALL = (
    # the gateway
    Kind("listening", "info", "the gateway accepts requests at {http} and registrations at {grpc}"),
    Kind("draining", "info", "the gateway lets {num_requests} requests end within {seconds} s, and takes no new ones"),
    Kind("drain_timed_out", "warning", "{num_requests} requests did not end within {seconds} s, and were ended"),
    Kind("gateway_stopped", "info", "the gateway has stopped"),
    Kind(
        "gateways_lost", "error", "no heartbeat of the gateways {incarnations}: their {num_rows} open rows are closed"
    ),
    Kind("gateway_declared_lost", "error", "another gateway has declared this one lost: {reason}"),
    Kind("database_failed", "error", "the database failed: {error}", window_seconds=60.0, per_window=1),
    Kind("database_migrated", "info", "the database went from revision {before} to {revision}"),
    Kind(
        "loop_stalled",
        "warning",
        "the gateway's event loop stood still for {seconds} s",
        window_seconds=60.0,
        per_window=1,
        highest="seconds",
    ),
    Kind("background_loop_failed", "error", "the background loop {task} failed and was started again"),
    Kind("text_process_killed", "warning", "a text process was ended: {reason}", "reason"),
    Kind("text_zygote_ended", "error", "the process that forks text processes ended; it was started again"),
    Kind("events_lost", "error", "{num} events could not be kept in the database"),
    # workers and models
    Kind("worker_joined", "info", "{what} {worker} has joined", source="workers"),
    Kind("worker_ready", "info", "{what} {worker} is ready", source="workers"),
    Kind("worker_draining", "info", "{what} {worker} finishes what runs and takes nothing new", source="workers"),
    Kind("worker_failed", "error", "{what} {worker} failed: {error}", source="workers"),
    Kind("worker_suspected", "warning", "no heartbeat of {what} {worker}: nothing new goes there", source="workers"),
    Kind(
        "worker_apart",
        "warning",
        "{what} {worker} is kept apart: its {cause} differs from most others'",
        source="workers",
    ),
    Kind(
        "worker_ejected",
        "warning",
        "{role} worker {worker} gets no requests for {seconds} s and until it does well again: {reason}",
        "cause",
    ),
    Kind("worker_reinstated", "info", "{role} worker {worker} gets requests again"),
    Kind("worker_left", "info", "{what} {worker} has left", source="workers"),
    Kind("worker_lost", "error", "{what} {worker} is lost", source="workers"),
    Kind("device_error", "error", "{device} of {what} {worker} reports {cause}", source="workers"),
    Kind("drain_requested", "info", "an operator drains {worker}"),
    Kind("resume_requested", "info", "an operator resumes {worker}"),
    Kind("worker_proven", "info", "a probe has gone the whole way through {worker}"),
    Kind("worker_probe_failed", "warning", "a probe through {worker} failed: {error}"),
    Kind("roll_started", "info", "{num_workers} workers are to be replaced, one by one"),
    Kind("roll_step", "info", "{worker} was replaced by {to}; {num_workers} are replaced"),
    Kind("roll_finished", "info", "{num_workers} workers were replaced"),
    Kind("roll_rolled_back", "warning", "the replacement of workers was taken back: {reason}"),
    Kind("model_ready", "info", "{model} has answered a request; handed over from prefill to decode: {handed_over}"),
    Kind("model_unready", "warning", "no decode worker takes requests for {model}", source="workers"),
    Kind("probe_failed", "warning", "the readiness probe of {model} failed: {error}"),
    Kind("model_unusable", "warning", "the files that a worker registered for {model} cannot be used: {error}"),
    # requests
    Kind(
        "request_migrated", "warning", "an answer went on at {to} after {worker} was lost", "cause", source="requests"
    ),
    Kind(
        "request_restarted",
        "warning",
        "a prompt was computed again after {worker} was lost",
        "cause",
        source="requests",
    ),
    Kind(
        "stream_crossed_class",
        "warning",
        "an answer went on at {to} in another numerics class than {worker}'s",
        "cause",
        source="requests",
    ),
    Kind("request_failed", "error", "{count} requests failed", "cause", source="requests"),
    Kind("requests_refused", "warning", "{count} requests were refused", "cause", source="requests"),
    Kind("migration_failed", "error", "an answer could not go on: {error}"),
    Kind("request_quarantined", "error", "a request that ended several workers is refused from now on"),
    Kind("client_too_slow", "warning", "an answer was ended: its client reads too slowly"),
    # KV memory
    Kind("kv_orphan", "error", "KV memory has no user: {num_bytes} bytes at {worker}", "kind"),
    Kind("kv_orphan_gone", "info", "KV memory without a user is free again at {worker}", "kind"),
    # identity
    Kind("fleet_made", "info", "the fleet {fleet} was made"),
    Kind("member_joined", "info", "a {role} process has joined the fleet as {id}"),
    Kind("member_renewed", "info", "the {role} process {id} has renewed its certificate"),
    Kind("member_revoked", "warning", "the {role} process {id} was revoked"),
    Kind("enrolment_refused", "warning", "a process at {address} was not let into the fleet", "kind"),
    Kind("authority_added", "info", "authority {authority} is trusted from now on"),
    Kind("authority_switched", "info", "authority {authority} issues all certificates from now on"),
    Kind("authority_removed", "info", "authority {authority} is no longer trusted"),
    Kind("gateway_certificate_renewed", "info", "the gateway's certificate was renewed"),
    Kind("gateway_certificate_not_renewed", "error", "the gateway's certificate could not be renewed: {error}"),
    Kind("gateway_revoked", "error", "this gateway was revoked, and ends"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
FROM_LOG: dict[str, Kind] = {name: kind for name, kind in KINDS.items() if kind.source == "log"}

"""Shows the fleet and its requests as they change, for `tandem top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem_client.cli.explanation import milliseconds
from tandem_client.cli.fleet import FleetMember

_STATES = {
    "finished": "green",
    "failed": "red",
    "cancelled": "yellow",
    "aborted": "red",
    "running": "cyan",
    "queued": "yellow",
}
_WORKER_STATES = {"ready": "green", "loading": "cyan", "draining": "yellow", "failed": "red"}
_BAR_WIDTH = 12
_OTHER_LINES = 15
"""Heads, rules and margins of three tables, and a summary of three lines."""


@dataclass(frozen=True)
class Seen:
    """One look at a fleet."""

    url: str
    members: Sequence[FleetMember]
    requests: Sequence[Mapping[str, Any]]
    """Summaries: those that run first, then the newest."""
    problem: str = ""
    """Why this look is an old one."""


@dataclass(frozen=True)
class _Model:
    """The workers of one model, together."""

    name: str
    num_workers: int
    num_ready: int
    num_running: int
    num_waiting: int
    kv_used_bytes: int
    kv_cached_bytes: int
    kv_total_bytes: int

    @classmethod
    def of(cls, name: str, members: Sequence[FleetMember]) -> _Model:
        pools = [member.pool for member in members if member.pool is not None]
        return cls(
            name,
            len(members),
            sum(_is_ready(member) for member in members),
            sum(member.num_running for member in members if member.role != "prefill"),
            sum(member.num_waiting for member in members),
            sum(pool.used_blocks * pool.bytes_per_block for pool in pools),
            sum(pool.cached_blocks * pool.bytes_per_block for pool in pools),
            sum(pool.total_blocks * pool.bytes_per_block for pool in pools),
        )


def top_view(seen: Seen, height: int) -> Group:
    """Return the view for a terminal of so many lines: a summary, the models, then workers and requests that fit."""
    models = _models(seen.members)
    num_rows = max(6, height - len(models) - _OTHER_LINES)
    num_workers = min(len(seen.members), max(num_rows // 2, num_rows - max(1, len(seen.requests))))
    parts: list[RenderableType] = [_summary(seen)]
    if models:
        parts.append(_model_table(models))
    if seen.members:
        parts.append(_worker_table(seen.members, num_workers))
    num_requests = num_rows - num_workers
    parts.append(
        _request_table(seen.requests[:num_requests]) if seen.requests else Text("no requests yet", style="dim")
    )
    return Group(*(Padding(part, (0, 1)) for part in parts))


def _models(members: Sequence[FleetMember]) -> list[_Model]:
    names = sorted({member.model for member in members if member.model})
    return [_Model.of(name, [member for member in members if member.model == name]) for name in names]


def _summary(seen: Seen) -> Text:
    num_ready = sum(_is_ready(member) for member in seen.members)
    running = [each for each in seen.requests if each["state"] == "running"]
    rate = sum(each["tokens_per_second"] or 0.0 for each in running)
    orphan_bytes = sum(orphan.num_bytes for member in seen.members for orphan in member.orphans)
    text = Text.assemble(
        ("Tandem", "bold"),
        f" at {seen.url}  ",
        (f"{num_ready} of {len(seen.members)} ready", "green" if num_ready == len(seen.members) else "yellow"),
        f"\n{len(running):,} running  {sum(each['state'] == 'queued' for each in seen.requests):,} queued"
        f"  {rate:,.0f} tokens/s",
    )
    if orphan_bytes:
        text.append(f"  {_size(orphan_bytes)} orphaned", style="red")
    if seen.problem:
        text.append(f"\n{seen.problem}", style="yellow")
    return text


def _is_ready(member: FleetMember) -> bool:
    return member.takes_requests


def _worker_table(members: Sequence[FleetMember], num_rows: int) -> RenderableType:
    """Return as many workers as fit: those with a problem first, then the busiest."""
    order = sorted(members, key=lambda each: (_is_ready(each), -each.num_running - each.num_waiting))
    shown = order[: num_rows if num_rows == len(members) else max(1, num_rows - 1)]
    if len(shown) == len(members):
        shown = list(members)  # all fit: they keep their places
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1), pad_edge=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True, min_width=max(len(_state(each)) for each in shown))
    for title in ("run", "wait"):
        table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
    table.add_column("KV memory", no_wrap=True, min_width=_BAR_WIDTH)
    table.add_column("memory", no_wrap=True, overflow="ellipsis")
    for each in shown:
        counts = ("", "") if each.role == "kv" else (f"{each.num_running:,}", f"{each.num_waiting:,}")
        table.add_row(Text(each.name, "bold"), _state(each), *counts, _kv(each), _memory(each))
    hidden = len(members) - len(shown)
    return Group(table, Text(f"and {hidden:,} more: tandem status", style="dim")) if hidden else table


def _state(member: FleetMember) -> Text:
    if member.suspected:
        return Text("suspected", "yellow")
    if member.is_sick:
        return Text(member.health, "yellow")
    return Text(member.state, _WORKER_STATES.get(member.state, ""))


def _kv(member: FleetMember) -> Text:
    if pool := member.pool:
        return _bar(pool.used_blocks, pool.cached_blocks, pool.total_blocks)
    if member.arena is not None and member.arena.total_bytes:
        return _bar(member.arena.total_bytes - member.arena.free_bytes, 0, member.arena.total_bytes)
    return Text("")


def _memory(member: FleetMember) -> Text:
    """Return the device's memory and load, else the process's share of the host's memory."""
    if devices := member.memory.get("devices"):
        used, total = (sum(device.get(key) or 0 for device in devices) for key in ("used_bytes", "total_bytes"))
        loads = [load for device in devices if (load := device.get("utilization_percent")) is not None]
        busy = f", {max(loads)} %" if loads else ""  # MIG instances have none
        return Text(f"{used / (1 << 30):.0f}/{total / (1 << 30):.0f} GiB{busy}" if total else "memory unknown")
    host = member.memory.get("host") or {}
    return Text(f"{_size(host['process_bytes'])} own" if host.get("process_bytes") else "", style="dim")


def _model_table(models: Sequence[_Model]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1), pad_edge=False)
    table.add_column("model", overflow="fold")
    for title in ("workers", "running", "waiting"):
        table.add_column(title, justify="right")
    table.add_column("KV memory: used, cached")
    for model in models:
        ready = Text(
            f"{model.num_ready}/{model.num_workers}", "green" if model.num_ready == model.num_workers else "yellow"
        )
        table.add_row(
            Text(model.name, "bold"), ready, f"{model.num_running:,}", f"{model.num_waiting:,}", _model_memory(model)
        )
    return table


def _model_memory(model: _Model) -> Text:
    if not model.kv_total_bytes:
        return Text("")
    bar = _bar(model.kv_used_bytes, model.kv_cached_bytes, model.kv_total_bytes)
    return bar.append(f" {_size(model.kv_used_bytes)} of {_size(model.kv_total_bytes)}", style="default")


def _bar(used: float, cached: float, total: float) -> Text:
    """Draw used and cached parts of a total; a part above zero gets a character."""
    num_used = min(_BAR_WIDTH, max(1, round(_BAR_WIDTH * used / total))) if used else 0
    num_cached = min(_BAR_WIDTH - num_used, max(1, round(_BAR_WIDTH * cached / total))) if cached else 0
    bar = Text("━" * num_used, style="magenta").append("━" * num_cached, style="blue")
    return bar.append("━" * (_BAR_WIDTH - num_used - num_cached), style="bright_black")


def _request_table(requests: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1), pad_edge=False)
    for title in ("request", "state", "model"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for title in ("prompt", "answer", "first", "tok/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in requests:
        state = Text(each["state"], _STATES.get(each["state"], ""))
        first = "" if each["ttft_ms"] is None else milliseconds(each["ttft_ms"])
        rate = "" if each["tokens_per_second"] is None else f"{each['tokens_per_second']:,.0f}"
        prompt = f"{each['prompt_tokens']:,}"
        if each["cached_tokens"]:
            prompt += f" ({each['cached_tokens'] / max(1, each['prompt_tokens']):.0%})"
        table.add_row(
            Text(each["id"][:8], "dim"),
            state,
            each["model"] or Text(each["error"], "red"),
            prompt,
            f"{each['completion_tokens']:,}",
            first,
            rate,
        )
    return table


def _size(num_bytes: float) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.0f} MiB"

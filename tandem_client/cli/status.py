"""Shows the fleet as a table, for `tandem status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem_client.cli.fleet import Arena, FleetMember, Link, Orphan, Pool

_STATE_STYLES = {"ready": "green", "loading": "cyan", "draining": "yellow", "failed": "red"}
_BAR_WIDTH = 14


def fleet_view(members: Sequence[FleetMember], url: str) -> Group:
    """Return a summary line and the table."""
    return Group(Padding(_summary(members, url), (1, 1, 0, 1)), _table(members) if members else Text())


def _summary(members: Sequence[FleetMember], url: str) -> Text:
    if not members:
        return Text.assemble(("Tandem", "bold"), f" at {url}: no worker has registered yet")
    num_ready = sum(member.takes_requests for member in members)
    all_ready = num_ready == len(members)
    return Text.assemble(
        ("Tandem", "bold"),
        f" at {url}  ",
        (f"{num_ready} of {len(members)} ready", "green" if all_ready else "yellow"),
        f"  {sum(member.num_running for member in members)} running",
        f"  {sum(member.num_waiting for member in members)} waiting",
    )


def _table(members: Sequence[FleetMember]) -> Table:
    """Return three columns of short lines, which fit a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1), pad_edge=True)
    for title in ("worker", "load", "memory"):
        table.add_column(title, overflow="fold")
    for index, member in enumerate(members):
        if index:
            table.add_row()
        table.add_row(*(Text("\n").join(cell) for cell in (_who(member), _load(member), _memory(member))))
    return table


def _who(member: FleetMember) -> list[Text]:
    state, style = member.state, _STATE_STYLES.get(member.state, "")
    if member.suspected:
        state, style = f"{member.state}?", "yellow"
    elif member.is_sick:
        state, style = member.health, "yellow"
    role = "" if member.name.startswith(member.role) else f"{member.role} "
    lines = [
        Text.assemble((member.name, "bold"), " ", (state, style)),
        Text(f"{role}{member.address}".strip(), style="dim"),
    ]
    if member.name != member.id:
        lines.append(Text(member.id, style="dim"))
    return [*lines, Text(member.model)] if member.model else lines


def _load(member: FleetMember) -> list[Text]:
    heard = Text(f"heartbeat {member.heartbeat_age_seconds:.1f} s ago", style="yellow" if member.suspected else "dim")
    if member.error:
        return [Text(member.error, style="red"), heard]
    if member.is_sick:
        return [Text(member.health_reason, style="yellow"), heard]
    if member.state == "loading":
        return [Text(f"{member.load_stage.replace('_', ' ')} {member.load_progress:.0%}".strip(), style="cyan"), heard]
    if member.role == "kv":
        handles = Text(f"{member.arena.num_handles if member.arena else 0:,} handles")
        return [handles, *(line for link in member.links for line in _link(link)), heard]
    requests = f"{member.num_running:,} running, {member.num_waiting:,} waiting"
    return [Text(requests), Text(f"{member.num_tokens_in_flight:,} tokens in flight"), heard]


def _link(link: Link) -> list[Text]:
    """Return one line, and a second one for a link that fell back or is slow."""
    figures = [link.transport or "opening"]
    if link.bytes_per_second:
        figures.append(f"{_bytes(link.bytes_per_second)}/s")
    if link.latency_ms:
        figures.append(f"{link.latency_ms:.1f} ms")
    line = Text(f"from {link.address} {', '.join(figures)}", style="yellow" if link.note else "")
    return [line, Text(link.note, style="yellow")] if link.note else [line]


def _memory(member: FleetMember) -> list[Text]:
    pool = _pool(member.pool) if member.pool else _arena(member.arena) if member.arena else []
    pool += _orphans(member)
    devices = [line for device in member.memory.get("devices") or [] for line in _device(device)]
    return [*pool, *(devices or _host(member.memory))]


def _pool(pool: Pool) -> list[Text]:
    bar = _bar(((pool.used_blocks, "magenta"), (pool.cached_blocks, "blue")), pool.total_blocks)
    shares = Text.assemble(
        (f"{pool.used_blocks:,} used", "magenta"),
        "  ",
        (f"{pool.cached_blocks:,} cached", "blue"),
        f"  {pool.free_blocks:,} free",
    )
    return [bar.append(f" {pool.total_blocks:,} KV blocks"), shares]


def _arena(arena: Arena) -> list[Text]:
    used_bytes = arena.total_bytes - arena.free_bytes
    bar = _bar(((used_bytes, "magenta"),), arena.total_bytes)
    return [bar.append(f" {_bytes(arena.total_bytes)} arena"), Text(f"{_bytes(used_bytes)} used", style="magenta")]


def _orphans(member: FleetMember) -> list[Text]:
    """Return one red line per kind of orphan that the auditor found; else the total of the KV service itself."""
    num_known = member.arena.orphan_bytes if member.arena else 0
    if not member.orphans:
        return [Text(f"{_bytes(num_known)} orphaned", style="red")] if num_known else []
    kinds = {orphan.what: [each for each in member.orphans if each.what == orphan.what] for orphan in member.orphans}
    return [Text(_orphaned(what, found), style="red") for what, found in kinds.items()]


def _orphaned(what: str, orphans: Sequence[Orphan]) -> str:
    num_bytes, seconds = sum(each.num_bytes for each in orphans), max(each.seconds for each in orphans)
    times = f", {len(orphans)} of them" if len(orphans) > 1 else ""
    return f"{_bytes(num_bytes)} orphaned for {seconds:.0f} s: {what}{times}"


def _bar(parts: Sequence[tuple[int, str]], total: int) -> Text:
    """Draw the parts of a total as a bar; each part above zero gets at least one character."""
    bar = Text()
    for amount, style in parts:
        width = min(_BAR_WIDTH - len(bar), max(1, round(_BAR_WIDTH * amount / total)) if amount and total else 0)
        bar.append("━" * width, style=style)
    return bar.append("━" * (_BAR_WIDTH - len(bar)), style="bright_black")


def _device(device: Mapping[str, Any]) -> list[Text]:
    number = "/".join(str(part) for part in (device.get("index"), device.get("mig_instance")) if part not in (None, ""))
    lines = [Text(f"GPU {number} {device.get('name') or ''}".rstrip())]
    if device.get("total_bytes"):
        lines.append(Text(f"{_bytes(device.get('used_bytes') or 0)} used of {_bytes(device['total_bytes'])}"))
        lines.append(Text(_gauges(device)))
    if device.get("foreign_bytes"):
        lines.append(Text(f"{_bytes(device['foreign_bytes'])} held by others", style="yellow"))
    elif reason := device.get("foreign_unknown"):
        lines.append(Text(f"held by others: unknown ({reason})", style="dim"))
    if device.get("throttle_reasons"):
        lines.append(Text(f"slowed: {', '.join(device['throttle_reasons'])}", style="yellow"))
    if device.get("error"):
        lines.append(Text(device["error"], style="yellow"))
    return lines


def _gauges(device: Mapping[str, Any]) -> str:
    """Describe load, heat and power; a figure that NVML does not give is unknown, not 0."""
    busy, warm = device.get("utilization_percent"), device.get("temperature_celsius")
    power = device.get("power_milliwatts")
    return ", ".join(
        (
            "load unknown" if busy is None else f"{busy} % busy",
            "heat unknown" if warm is None else f"{warm} °C",
            "power unknown" if power is None else f"{power / 1000:.0f} W",
        )
    )


def _host(memory: Mapping[str, Any]) -> list[Text]:
    host = memory.get("host") or {}
    if not host.get("total_bytes"):
        return [Text("memory not reported", style="dim")]
    own, free = _bytes(host.get("process_bytes") or 0), _bytes(host.get("available_bytes") or 0)
    lines = [Text(f"{own} own"), Text(f"{free} free of {_bytes(host['total_bytes'])}")]
    source = str(memory.get("source") or "")
    if "uses no device" in source:  # a KV service
        return lines
    has_no_gpu = "Library Not Found" in source or "not installed" in source  # as on any laptop
    return [*lines, Text("no GPU" if has_no_gpu else source, style="dim")]


def _bytes(number: float) -> str:
    """Format bytes in the unit that leaves one to four digits: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"

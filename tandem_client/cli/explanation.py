"""Shows the explanation of one request, for `tandem explain`: where its time went, and why it went where."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tandem_client.cli.terminal import harmless

_BAR_WIDTH = 24
_STATES = {"finished": "green", "failed": "red", "cancelled": "yellow", "aborted": "red"}
_COLOURS = {
    "gateway": "cyan",
    "text": "blue",
    "prefill": "magenta",
    "kv": "yellow",
    "decode": "green",
    "encode": "green",
}
_PHASE_COLOURS = {
    "text": "blue",
    "queue": "yellow",
    "route": "cyan",
    "prefill": "magenta",
    "hand_over": "yellow",
    "decode": "green",
    "encode": "green",
}
_MEANINGS = {
    "body": "reading the body",
    "text_wait": "waiting for a text process",
    "text": "template, tokens, hashes",
    "limits": "limits of the account",
    "queue": "waiting for room",
    "route": "choosing workers",
    "submit": "on the way to the worker",
    "worker_queue": "waiting in the worker",
    "prefill": "computing the prompt",
    "transport": "first token on its way back",
    "detokenize": "tokens to text",
    "write": "to the connection",
}
_KINDS = {"hand_over": "hand-over", "migration": "migration", "restart": "restart"}


def explanation_view(explained: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Group:
    """Return everything that is known of a request, for a terminal of 80 columns or more.

    `names`: what operators call the workers, by their ids.
    """
    explained = {name: _named(value, names or {}) for name, value in explained.items() if name != "texts"} | {
        "texts": explained["texts"]
    }
    return Group(*(Padding(part, (0, 1, 1, 1)) for part in _parts(explained)))


def _named(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value of JSON with the names of workers in place of their ids."""
    if isinstance(value, dict):
        return {name: _named(each, names) for name, each in value.items()}
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if not isinstance(value, str):
        return value
    if value in names:
        return names[value]
    return re.sub(r"\b[0-9a-f]{16}\b", lambda found: names.get(found[0], found[0]), value)


def _parts(explained: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _head(explained)
    if explained["segments"]:
        yield Group(Text("Time to the first token", style="bold"), _segments(explained))
    if explained["phases"]:
        yield Group(Text("The whole request", style="bold"), _phases(explained))
    if admission := explained.get("admission"):  # a gateway of the release before sends none
        yield _admission(admission)
    if explained["route"]:
        yield Group(*_route(explained["route"]))
    if explained["moves"]:
        yield Group(Text("What moved", style="bold"), _moves(explained["moves"]))
    yield Group(Text("Cost", style="bold"), _cost(explained["usage"]))
    if explained["texts"]:
        texts = (Text(harmless(explained["texts"][name], keep="\n\t")) for name in ("prompt", "answer"))
        yield Group(Text("Texts", style="bold"), *texts)


def _head(explained: Mapping[str, Any]) -> Text:
    state = explained["state"]
    started = datetime.fromtimestamp(explained["started_ms"] / 1000).strftime("%Y-%m-%d %H:%M:%S")
    why = explained["error"] or ", ".join(explained["finish_reasons"])
    head = Text.assemble(
        (f"{explained['operation'].replace('_', ' ')} ", "bold"),
        (explained["model"] or "no model", "bold"),
        "  ",
        (state, _STATES.get(state, "cyan")),
        f" ({why})" if why else "",
        (f"\n{explained['id']}  account {explained['account']}  {started}", "dim"),
    )
    figures = [f"{milliseconds(explained['duration_ms'])} in all"]
    if explained["ttft_ms"] is not None:
        figures.insert(0, f"first token after {milliseconds(explained['ttft_ms'])}")
    if explained["tokens_per_second"] is not None:
        figures.append(f"{explained['tokens_per_second']:,.1f} tokens/s")
    head.append("\n" + ", ".join(figures))
    if explained["trace_id"]:
        head.append(f"\ntrace {explained['trace_id']}", style="dim")
    return head


def _segments(explained: Mapping[str, Any]) -> Table:
    whole = explained["ttft_ms"] or sum(each["duration_ms"] for each in explained["segments"]) or 1.0
    table = _grid(4)
    for each in explained["segments"]:
        bar = _bar(each["start_ms"], each["duration_ms"], whole, _COLOURS.get(each["process"], "white"))
        meaning = Text(_MEANINGS.get(each["name"], ""), style="dim")
        if each["worker"]:
            meaning.append(f", {each['worker']}")
        table.add_row(each["name"], bar, _right(each["duration_ms"]), meaning)
    if abs(explained["unexplained_ms"]) >= 0.001:
        table.add_row("unexplained", Text(), _right(explained["unexplained_ms"]), Text("in no part", style="dim"))
    return table


def _phases(explained: Mapping[str, Any]) -> Table:
    whole = max(explained["duration_ms"], 0.001)
    table = _grid(4)
    for each in explained["phases"]:
        bar = _bar(each["start_ms"], each["duration_ms"], whole, _COLOURS.get(each["name"], "white"))
        about = Text(each["worker"], style="dim")
        if each["num_tokens"]:
            about.append(f"{', ' if each['worker'] else ''}{each['num_tokens']:,} tokens")
        table.add_row(_KINDS.get(each["name"], each["name"]), bar, _right(each["duration_ms"]), about)
    return table


def _admission(admission: Mapping[str, Any]) -> Text:
    """Return how the request stood when it came: its class, the queue, its predicted cost and its account's use."""
    num_waiting, wait_ms = admission["num_waiting"], admission["predicted_wait_ms"]
    queue = f"{num_waiting:,} waited already" if num_waiting else "nobody waited"
    if num_elsewhere := admission.get("num_waiting_elsewhere", 0):  # gateways of earlier releases do not tell
        queue = f"{num_waiting:,} waited already at its gateway, {num_elsewhere:,} at others"
    wait = f", predicted wait {milliseconds(wait_ms)}" if wait_ms else ""
    return Text.assemble(
        ("When it came", "bold"),
        f"\nclass {admission['service_class']}, {queue}{wait}\n",
        (
            f"predicted device time {milliseconds(admission['cost_ms'])}; "
            f"its account's counter for the model was at {milliseconds(admission['used_ms'])}",
            "dim",
        ),
        (_grant("decode", admission.get("grant")) + _grant("prefill", admission.get("prefill_grant")), "dim"),
    )


def _grant(role: str, grant: Mapping[str, Any] | None) -> str:
    """Return what the worker of a role had granted; nothing if the gateway estimated its room."""
    if grant is None:
        return ""
    num_requests, num_tokens = grant["num_requests"], grant["num_tokens"]
    return f"\ngrant {grant['number']:,} left {num_requests:,} requests and {num_tokens:,} tokens at {role}"


def _route(route: Mapping[str, Any]) -> Iterator[RenderableType]:
    where = f"prefill at {route['prefill']}, decode at {route['decode']}" if route["prefill"] else route["decode"]
    yield Text.assemble(("Why it went there", "bold"), f"\n{where}\n", (route["reason"], "dim"))
    if route["candidates"]:
        yield _candidates(route["candidates"], route["runner_up"])
        yield from _expected_hand_over(route["candidates"])
    if len(route["attempts"]) > 1:
        for each in route["attempts"]:
            pair = " → ".join(name for name in (each["prefill"], each["decode"]) if name)
            yield Text(f"attempt {each['attempt'] + 1}: {pair}: {each['outcome']}")


def _candidates(candidates: Sequence[Mapping[str, Any]], runner_up: Mapping[str, Any] | None) -> Table:
    """Return the workers that were compared: predicted milliseconds, cached tokens and load."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1), pad_edge=False)
    table.add_column("worker", overflow="fold")
    table.add_column("", no_wrap=True)
    for title in ("ms", "queue", "load", "compute", "cached", "busy"):
        table.add_column(title, justify="right")
    for each in candidates:
        is_second = runner_up is not None and (each["role"], each["worker"]) == (runner_up["role"], runner_up["worker"])
        mark = Text("chosen", "green") if each["is_chosen"] else Text("runner-up" if is_second else "", "dim")
        role = "" if each["worker"].startswith(each["role"]) else f"{each['role']} "
        name = Text.assemble((role, "dim"), (each["worker"], "bold" if each["is_chosen"] else ""))
        cached = sum(each["cached_tokens"].values())
        figures = [f"{each[key]:,.1f}" for key in ("predicted_ms", "queue_ms", "load_ms", "compute_ms")]
        table.add_row(name, mark, *figures, f"{cached:,}", f"{each['load']:.0%}")
    return table


def _expected_hand_over(candidates: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield what the router expected of the hand-over: from the chosen prefill worker, or from the soonest one."""
    prefills = [each for each in candidates if each["role"] == "prefill"]
    for each in sorted(prefills, key=lambda each: (not each["is_chosen"], each["predicted_ms"]))[:1]:
        if (found := each.get("hand_over")) is not None:  # a gateway of the release before sends none
            hosts = f"hand-over from {found['from_host']} to {found['to_host']}"
            size, rate = (found[name] / (1 << 20) for name in ("num_bytes", "bytes_per_second"))
            fixed, rest = milliseconds(found["fixed_ms"]), milliseconds(found["transfer_ms"])
            wait = f" + {milliseconds(found['wait_ms'])} for room in the arena" if found["wait_ms"] else ""
            yield Text(f"{hosts}: {size:,.1f} MiB at {rate:,.1f} MiB/s; {fixed} + {rest} for the rest{wait}", "dim")


def _moves(moves: Sequence[Mapping[str, Any]]) -> Table:
    table = _grid(3)
    for each in moves:
        what = Text(f"{each['from']} → {each['to']}")
        details = [each["why"]]
        if each["num_bytes"]:
            details.append(f"{each['num_bytes'] / (1 << 20):,.2f} MiB over {each['transport'] or '?'}")
        if each["num_tokens"]:
            details.append(f"{each['num_tokens']:,} tokens")
        if each["duration_ms"]:
            details.append(f"in {milliseconds(each['duration_ms'])}")
        if seam := each.get("seam"):
            details.append(
                f"other numerics from token {seam['position']:,} on: {seam['from_class']} → {seam['to_class']}"
            )
        what.append(f"  {', '.join(details)}", style="dim")
        kind = _KINDS.get(each["kind"], each["kind"])
        table.add_row(kind, Text(f"at {milliseconds(each['time_ms'])}", style="dim"), what)
    return table


def _cost(usage: Mapping[str, Any]) -> Text:
    cached = {"pool": usage["pool_tokens"], "store": usage["store_tokens"], "other host": usage["remote_tokens"]}
    places = ", ".join(f"{count:,} from the {place}" for place, count in cached.items() if count)
    cost = Text(
        f"prompt {usage['prompt_tokens']:,} tokens: {usage['computed_tokens']:,} computed, "
        f"{usage['cached_tokens']:,} cached{f' ({places})' if places else ''}\n"
        f"answer {usage['completion_tokens']:,} tokens; prefill {milliseconds(usage['prefill_us'] / 1000)}, "
        f"decode {milliseconds(usage['decode_us'] / 1000)}"
    )
    if usage["reprefill_tokens"]:
        cost.append(f"\n{usage['reprefill_tokens']:,} tokens were computed again (not billed)", style="yellow")
    if usage["microneurons"]:
        cost.append(f"\n{usage['microneurons'] / 1e6:,.6f} neurons")
    return cost


def milliseconds(number: float) -> str:
    """Return a duration as text: microseconds below 1 ms, seconds from 10 s."""
    if abs(number) < 1:
        return f"{number * 1000:,.0f} µs"
    return f"{number / 1000:,.1f} s" if number >= 10_000 else f"{number:,.1f} ms"


def _right(duration_ms: float) -> Text:
    return Text(milliseconds(duration_ms), justify="right")


def _bar(start: float, duration: float, whole: float, style: str) -> Text:
    """Draw a part of a whole at its place; each part gets at least one character."""
    first = min(_BAR_WIDTH - 1, max(0, round(_BAR_WIDTH * start / whole)))
    width = max(1, min(_BAR_WIDTH - first, round(_BAR_WIDTH * duration / whole)))
    bar = Text("·" * first, style="bright_black")
    bar.append("━" * width, style=style)
    return bar.append("·" * (_BAR_WIDTH - first - width), style="bright_black")


def _grid(num_columns: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for number in range(num_columns):
        table.add_column(overflow="fold", no_wrap=number < num_columns - 1)
    return table

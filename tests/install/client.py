"""Asks a gateway with curl, as the pages do, from inside a container's network."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.namespaces import NetworkHost

MODEL = "@tandem/demo"
GATEWAY = "http://127.0.0.1:8642"
LONG = {"prompt": "What is a KV cache?", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
"""A request whose answer takes seconds, with the same tokens each time."""
_STREAM_SECONDS = 120


@dataclass(frozen=True)
class Answer:
    text: str
    num_events: int
    first_seconds: float
    """From the start of curl to the first event with text."""


def stream(
    network: NetworkHost,
    inputs: Mapping[str, Any],
    token: str = "",
    on_event: Callable[[int], None] | None = None,
) -> Answer:
    """Stream an answer to its [DONE]; call `on_event` with the number of each event. Raises AssertionError."""
    started, first, parts = time.monotonic(), 0.0, []
    process = network.run(lambda: _curl({**inputs, "stream": True}, token))
    assert process.stdout is not None, "curl was started with a pipe"
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "errors" not in event and "error" not in event, event
                first = first or time.monotonic() - started
                parts.append(event.get("response") or "")
                if on_event is not None:
                    on_event(len(parts))
    assert "data: [DONE]\n" in lines, f"the stream ended early, after {len(parts)} events: {''.join(lines[-5:])}"
    return Answer("".join(parts), len(parts), first)


def status_of_request(network: NetworkHost, token: str) -> int:
    """Return the HTTP status of a short request for an answer."""
    return status_of(network, _path(token), token, "--data", '{"prompt": "Hi", "max_tokens": 2}')


def status_of(network: NetworkHost, path: str, token: str = "", *more: str) -> int:
    """Return the HTTP status of a path of the gateway, with more options of curl; 0 if nobody answers."""
    command = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "10"]
    done = network.run(
        lambda: subprocess.run(
            [*command, *_authorization(token), *more, GATEWAY + path], capture_output=True, text=True, check=False
        )
    )
    return int(done.stdout or 0)


def _curl(body: Mapping[str, Any], token: str) -> subprocess.Popen[str]:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", str(_STREAM_SECONDS)]
    command += [*_authorization(token), GATEWAY + _path(token), "--data", json.dumps(body)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _path(token: str) -> str:
    return f"/client/v4/accounts/{'me' if token else 'default'}/ai/run/{MODEL}"


def _authorization(token: str) -> list[str]:
    return ["--header", f"Authorization: Bearer {token}"] if token else []

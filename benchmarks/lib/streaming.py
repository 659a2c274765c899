"""Records when each token of a streamed answer reaches a client of the Workers AI REST interface."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import httpx

from benchmarks.lib.stats import Answer

_TIMEOUT_SECONDS = 300.0


def new_client(base_url: str) -> httpx.AsyncClient:
    """Return a client that keeps its connections, as real ones do; the loopback needs no proxy."""
    return httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=_TIMEOUT_SECONDS)


async def ask(
    client: httpx.AsyncClient, model: str, prompt: str, num_output_tokens: int, account: str = "default"
) -> Answer:
    """Stream one greedy answer of exactly that many tokens; raises RuntimeError for one that is not complete."""
    trace_id = secrets.token_hex(16)
    inputs = {
        "prompt": prompt,
        "raw": True,
        "stream": True,
        "temperature": 0,
        "max_tokens": num_output_tokens,
        "min_tokens": num_output_tokens,
    }
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    url = f"/client/v4/accounts/{account}/ai/run/{model}"
    times: list[float] = []
    usage: dict[str, Any] | None = None
    sent = time.perf_counter()
    async with client.stream("POST", url, json=inputs, headers=headers) as answer:
        if not answer.is_success:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
        async for line in answer.aiter_lines():
            came = time.perf_counter()
            event = _event(line)
            if event.get("response"):
                times.append(came)
            usage = event.get("usage", usage)
    if usage is None or not times:
        raise RuntimeError(f"the answer to request {trace_id} broke off after {len(times)} pieces of text")
    return Answer(
        trace_id=trace_id,
        sent=sent,
        token_times=tuple(times),
        ended=time.perf_counter(),
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
    )


def _event(line: str) -> dict[str, Any]:
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return {}
    event: dict[str, Any] = json.loads(data)
    return event

"""Streams answers from a gateway, as many at once as wanted, and counts those that fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

MODEL = "@tandem/demo"


@dataclass
class Stream:
    """One answer."""

    url: str
    num_tokens: int = 0
    first_token_seconds: float = 0.0
    problem: str = ""
    has_begun: threading.Event = field(default_factory=threading.Event)


class Load:
    """Streams that run; `began` waits for their first tokens, `failures` for their ends."""

    def __init__(self, urls: Sequence[str], token: str, max_tokens: int, model: str = MODEL) -> None:
        self.streams = [Stream(url) for url in urls]
        self._token = token
        self._max_tokens = max_tokens
        self._model = model
        self._pool = ThreadPoolExecutor(len(urls), "stream")
        self._futures: list[Future[None]] = [
            self._pool.submit(self._run, each, n) for n, each in enumerate(self.streams)
        ]

    def began(self, seconds: float = 60.0) -> None:
        """Wait until every stream has its first token. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        for stream in self.streams:
            stream.has_begun.wait(max(0.0, deadline - time.monotonic()))
            assert stream.num_tokens and not stream.problem, f"no token within {seconds:g} s: {stream.problem}"

    @property
    def num_running(self) -> int:
        return sum(not future.done() for future in self._futures)

    def failures(self) -> list[str]:
        """Wait for all streams; return why some failed."""
        for future in self._futures:
            future.result()
        self._pool.shutdown()
        return [each.problem for each in self.streams if each.problem]

    def _run(self, stream: Stream, number: int) -> None:
        began = time.monotonic()
        try:
            self._read(stream, number, began)
        except (httpx.HTTPError, OSError) as error:
            stream.problem = f"{type(error).__name__}: {error} after {stream.num_tokens} tokens"
        finally:
            stream.has_begun.set()

    def _read(self, stream: Stream, number: int, began: float) -> None:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"Tell story number {number} about a lighthouse and a ship."}],
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        url = f"{stream.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
            if response.status_code != 200:
                stream.problem = f"HTTP {response.status_code}: {response.read().decode()[:300]}"
                return
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    self._take(stream, json.loads(line.removeprefix("data: ")), began)
        stream.problem = stream.problem or f"the stream ended without [DONE] after {stream.num_tokens} tokens"

    def _take(self, stream: Stream, event: dict[str, object], began: float) -> None:
        if "error" in event:
            stream.problem = f"{event['error']} after {stream.num_tokens} tokens"
            return
        choices = event.get("choices")
        if isinstance(choices, list) and choices and choices[0]["delta"].get("content"):
            stream.num_tokens += 1
            if stream.num_tokens == 1:
                stream.first_token_seconds = time.monotonic() - began
                stream.has_begun.set()


def first_token(run: Callable[[Callable[[], Load]], Load], url: str, token: str = "", model: str = MODEL) -> float:
    """Stream one answer in the network of `run`; return the seconds to its first token. Raises AssertionError."""
    load = run(lambda: Load([url], token, 16, model))
    assert load.failures() == []
    assert load.streams[0].num_tokens > 0
    return load.streams[0].first_token_seconds

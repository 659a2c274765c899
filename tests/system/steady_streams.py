"""Clients that stream the same greedy prompts again and again, while the fleet under them changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import httpx

from tests.system.fleet import until

_THINK_SECONDS = 0.1
"""The pause of a client before its next request: most of the machine is for the processes that start."""


class SteadyStreams:
    """Each answer must be the first one to its prompt, whole; `failures` has what was not. `base_url` may change."""

    def __init__(
        self, http: httpx.AsyncClient, base_url: str, prompts: Sequence[str], num_tokens: int, num_clients: int = 2
    ) -> None:
        self._http = http
        self.base_url = base_url
        self._prompts = prompts
        self._num_tokens = num_tokens
        self._num_clients = num_clients
        self.expected: dict[str, str] = {}
        self.num_answered = 0
        self.failures: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Learn the answers, one after the other, then begin to ask."""
        for prompt in self._prompts:
            self.expected[prompt] = await self._answer(prompt)
        assert len(set(self.expected.values())) > 1
        self._tasks = [asyncio.create_task(self._ask(prompt)) for prompt in self._prompts[: self._num_clients]]

    async def more(self, number: int, describe: Callable[[], str]) -> None:
        """Wait for so many more answers."""
        wanted = self.num_answered + number
        await until(lambda: self.num_answered >= wanted or bool(self.failures), 60, describe)
        assert not self.failures, f"{self.failures}\n{describe()}"

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, prompt: str) -> None:
        while True:
            try:
                text = await self._answer(prompt)
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            if text != self.expected[prompt]:
                self.failures.append(f"{text!r} instead of {self.expected[prompt]!r}")
            self.num_answered += 1
            await asyncio.sleep(_THINK_SECONDS)

    async def _answer(self, prompt: str) -> str:
        text, num_tokens = "", 0
        body = {"model": "@tandem/demo", "prompt": prompt, "max_tokens": self._num_tokens, "ignore_eos": True}
        asked = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", f"{self.base_url}/v1/completions", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    assert num_tokens == self._num_tokens
                    return text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        raise AssertionError("a stream ended without [DONE]")

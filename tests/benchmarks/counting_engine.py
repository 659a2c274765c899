"""An engine for tests: computes nothing, speaks the whole protocol, fails or dies when told to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Load, serve


class CountingEngine:
    """Each prompt and each step takes `step_seconds`, by its own account."""

    def load(self, what: Load) -> None:
        self._settings: dict[str, Any] = dict(what.settings)
        self._seconds = float(self._settings.get("step_seconds", 1.0))
        self._held = 0
        self._obey("load")

    def prefill(self, prompt: Sequence[int]) -> float:
        self._obey("prefill")
        return self._seconds

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        assert not self._held, "the last ones were not released"
        self._obey("hold")
        self._held = len(prompts)

    def decode(self, num_steps: int) -> list[float]:
        assert self._held, "nothing is held"
        self._obey("decode")
        return [self._seconds] * num_steps

    def release(self) -> None:
        self._held = 0

    def _obey(self, order: str) -> None:
        print("libraries print what they like")
        if self._settings.get("fails") == order:
            raise RuntimeError("no more")
        if self._settings.get("dies") == order:
            os._exit(3)


if __name__ == "__main__":
    serve(CountingEngine())

"""Runs the engine process with vLLM and measures its thread's CPU time: `metered.py FIGURES.jsonl --fd N`.

A line per time from the first request to the moment that none is left:

    steps       vLLM's steps
    cpu         seconds of the thread
    vllm        seconds in the four calls of vLLM's step
    draw        seconds of Tandem's logits processor, which vLLM calls within a step
    add         seconds in vLLM's calls that add and end requests

So the adapter has cpu - vllm - add + draw. The calls of vLLM are measured from outside; nothing else is changed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem_engine.messages import StepDone
from tandem_engine.process import Core, main
from tandem_engine.settings import EngineConfig
from tandem_vllm.__main__ import ENVIRONMENT


class Meter:
    """Adds up CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*arguments: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - started

        return metered


class MeteredCore:
    """A core whose busy times are written to a file."""

    def __init__(self, core: Core, meter: Meter, figures: Path) -> None:
        self._core, self._meter, self._figures = core, meter, figures
        self._started: float | None = None
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def handle_some(self, command: Any, *fds: int) -> Sequence[object] | None:
        if self._started is None:
            self._started, self._num_steps = time.thread_time(), 0
            self._meter.seconds.clear()
        return self._core.handle_some(command, *fds)

    def run_step(self, emit: Callable[[Any], None]) -> None:
        events: list[Any] = []

        def emit_and_keep(event: Any) -> None:
            events.append(event)
            emit(event)

        self._core.run_step(emit_and_keep)
        self._num_steps += 1
        is_idle = any(isinstance(each, StepDone) and not each.stats.num_tokens_in_flight for each in events)
        if self._started is not None and is_idle:
            cpu = time.thread_time() - self._started
            with self._figures.open("a") as file:
                file.write(json.dumps({"steps": self._num_steps, "cpu": cpu, **self._meter.seconds}) + "\n")
            self._started = None


def _assemble(config: EngineConfig, report: Any, numa_node: int | None) -> tuple[Core, object, list[int]]:
    from tandem_vllm import engine as seam
    from tandem_vllm.assembly import assemble
    from tandem_vllm.sampling import TandemDraw

    meter = Meter()
    for name in ("apply", "update_state"):
        setattr(TandemDraw, name, meter.around("draw", getattr(TandemDraw, name)))
    made = seam.VllmEngine.__init__

    def metered(self: Any, core: Any, *more: Any, **named: Any) -> None:
        for owner, names in {
            core.scheduler: ("schedule", "update_from_output"),
            core.model_executor: ("execute_model", "sample_tokens"),
        }.items():
            for name in names:
                setattr(owner, name, meter.around("vllm", getattr(owner, name)))
        for name in ("preprocess_add_request", "add_request", "abort_requests"):
            setattr(core, name, meter.around("add", getattr(core, name)))
        made(self, core, *more, **named)

    seam.VllmEngine.__init__ = metered  # type: ignore[method-assign]
    core, ready, fds = assemble(config, report, numa_node)
    return MeteredCore(core, meter, Path(sys.argv[1])), ready, fds


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    code = main(sys.argv[2:], _assemble)
    sys.stderr.flush()
    os._exit(code)

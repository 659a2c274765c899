"""Lets engines compute prompts at a pace: a step with prompts takes its time. Python imports this module at start.

TANDEM_PACE_TOKENS is the rate in tokens a second. A machine with other load then has the same prefill worker as a quiet
one, as long as the engine needs less time for the step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

_RATE = float(os.environ.get("TANDEM_PACE_TOKENS", 0.0))


def at_pace(end_of_step: Callable[[Any, Any], Any], tokens_per_second: float) -> Callable[[Any, Any], Any]:
    """Return what ends a step no sooner than its prompt tokens take at that rate."""

    def end(core: Any, flight: Any) -> Any:
        num_tokens = sum(run.num_tokens for run in flight.output.runs if run.request.mode == "prefill")
        left_ns = flight.started_ns + 1e9 * num_tokens / tokens_per_second - time.monotonic_ns()
        time.sleep(max(0.0, left_ns / 1e9))
        return end_of_step(core, flight)

    return end


if _RATE and "tandem_engine.process" in sys.orig_argv:
    from tandem_engine.core import EngineCore

    EngineCore._end = at_pace(EngineCore._end, _RATE)  # type: ignore[assignment]

"""Dynamo's own router as a policy: its published package in a virtual environment, asked over a pipe.

TANDEM_DYNAMO_PYTHON names that environment's Python:

    python -m venv build/dynamo && build/dynamo/bin/pip install ai-dynamo-runtime==1.6.1
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from control_plane.simulator.engine import Job, Report
from control_plane.simulator.policies.policy import Placement
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.traces import TraceRequest

VARIABLE = "TANDEM_DYNAMO_PYTHON"
_PROCESS = Path(__file__).with_name("dynamo_process.py")
_BLOCK_BITS = (1 << 61) - 1
"""Dynamo's hashes are 64-bit numbers."""


def dynamo_python() -> str | None:
    """Return the Python that has Dynamo, None if there is none here."""
    return os.environ.get(VARIABLE) or None


class Dynamo:
    """One gateway with Dynamo's router. `close` ends its process."""

    report_seconds: float | None = None

    def __init__(self, fleet: FleetProfile, block_tokens: int, python: str) -> None:
        self._fleet = fleet
        self._process = subprocess.Popen(
            [python, str(_PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._ask(
            {
                "block_tokens": block_tokens,
                "pool_tokens": fleet.decode.kv_tokens,
                "num_prefill": fleet.num_prefill,
                "num_workers": fleet.num_workers,
            }
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, entry: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(entry) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            raise RuntimeError(f"Dynamo's process has ended: {errors.strip()[-500:]}")
        return json.loads(line)

    def place(self, request: TraceRequest, now: float) -> Placement | None:
        places = self._ask({"does": "place", **_prompt(request)})
        decode = places[-1][0]
        others = tuple(number for number in range(self._fleet.num_prefill, self._fleet.num_workers) if number != decode)
        prefill = places[0][0] if self._fleet.num_prefill else None
        return Placement(prefill, (decode, *others), predicted_cached=places[0][1])

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        self._ask({"does": "accepted", **_prompt(request), "prefill": placement.prefill, "decode": decode})

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        if not was_pulled:
            self._ask({"does": "prompt_read", "id": str(request.number)})

    def ended(self, request: TraceRequest, decode: int, hand_over_seconds: float | None) -> None:
        self._ask({"does": "ended", "id": str(request.number)})

    def report(self, report: Report, now: float) -> None:
        """Dynamo's router counts what it has sent itself."""


def _prompt(request: TraceRequest) -> dict[str, Any]:
    known = [hash(block_id) & _BLOCK_BITS for block_id in request.full_blocks]
    # Traces without shared prefixes have no ids: Dynamo counts blocks, so these are like no other.
    first, number = (1 << 62) + (request.number << 20), request.num_prompt_tokens // request.block_tokens
    blocks = known + [first + place for place in range(len(known), number)]
    return {"id": str(request.number), "blocks": blocks, "tokens": request.num_prompt_tokens}

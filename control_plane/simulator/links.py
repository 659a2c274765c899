"""When a KV cache that one worker computes is at another: within a host, or over the link into the reader's host.

The transfers into one host follow one another. Decode copies while prefill computes: only what the last step computes
moves after it.
"""

from __future__ import annotations

from control_plane.simulator.engine import Job
from control_plane.simulator.profiles import FleetProfile


class Links:
    """The links into all hosts."""

    def __init__(self, fleet: FleetProfile) -> None:
        self._fleet = fleet
        self._free_at = [0.0] * fleet.num_hosts

    def arrives_at(self, prefill: int, computed: Job, decode: int, reserved: Job, now: float) -> float:
        """Return when decode has the blocks of a prompt that prefill has just finished; what decode has stays away."""
        fleet = self._fleet
        here, there = fleet.host_of(prefill), fleet.host_of(decode)
        num_moved = max(0, computed.request.num_prompt_tokens - reserved.num_own)
        num_late = min(num_moved, computed.num_computed, fleet.prefill.chunk_tokens)
        if here == there:
            return now + fleet.hand_over_seconds + self._seconds(num_late, fleet.local_bytes_per_second)
        seconds = self._seconds(num_moved, fleet.link_bytes_per_second)
        late_seconds = self._seconds(num_late, fleet.link_bytes_per_second)
        began = max(self._free_at[there], computed.scheduled_at, now + late_seconds - seconds)
        self._free_at[there] = began + seconds
        return self._free_at[there] + fleet.link_seconds + fleet.hand_over_seconds

    def _seconds(self, num_tokens: int, bytes_per_second: float) -> float:
        return num_tokens * self._fleet.prefill.bytes_per_token / bytes_per_second

"""How long, how many, how hard?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """One run of chaos; all that is drawn in it is drawn from `seed`."""

    seed: int
    seconds: float = 900.0
    """How long the faults go on, at least."""
    num_streams: int = 500
    """How many streams there are, at least."""
    num_questions: int = 120
    num_clients: int = 18
    longest_thought_seconds: float = 1.0
    """What a client waits before it asks again, at the most."""
    pause_seconds: tuple[float, float] = (2.0, 6.0)
    """Between two faults."""
    rest_seconds: float = 3.0
    """For which a service has been up before it is hit again."""
    spares_one: bool = False
    """Whether the other of a role has to be up for one to be hit."""
    suspect_seconds: float = 3.0
    gone_seconds: float = 5.0
    lease_seconds: float = 10.0
    least_left_per_stage: int = 3
    longest_p99_pause_seconds: float = 1.0

    @property
    def stop_seconds(self) -> tuple[float, float]:
        """How long a stopped service sleeps: until its leases have run out, and it was forgotten."""
        return self.lease_seconds + 0.5, self.lease_seconds + 3.0


def short(seed: int) -> Options:
    """Return the form that is part of `make test`: quicker clocks, and more faults in the same time."""
    return Options(
        seed,
        seconds=24.0,
        num_streams=60,
        num_questions=24,
        num_clients=16,
        longest_thought_seconds=0.3,
        pause_seconds=(0.5, 2.0),
        rest_seconds=1.0,
        spares_one=True,  # a machine that is busy with other tests may take longer to start a worker than requests wait
        suspect_seconds=1.5,
        gone_seconds=2.5,
        lease_seconds=4.0,
        least_left_per_stage=1,
    )

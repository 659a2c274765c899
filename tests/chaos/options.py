"""The options of a run: duration, number of streams, rate of faults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options of one run; all randomness comes from `seed`."""

    seed: int
    seconds: float = 900.0
    """The minimum duration of the faults."""
    num_streams: int = 500
    """The minimum number of streams."""
    num_questions: int = 120
    num_clients: int = 18
    num_second_clients: int = 4
    """Clients of the second gateway, over HTTP."""
    num_embedding_clients: int = 2
    """Clients of the encode workers, over HTTP at both gateways."""
    max_think_seconds: float = 1.0
    """The longest pause of a client before its next request."""
    burst_size: int = 200
    """Requests at once: the decode workers have 72 places, and `max_waiting` wait at each gateway. 0: none."""
    burst_pause_seconds: tuple[float, float] = (30.0, 60.0)
    """Seconds between the end of one burst and the next."""
    max_waiting: int = 32
    """At each gateway: more than its clients ask for without a burst."""
    num_gateway_kinds: int = 3
    """Kinds of faults of the second gateway that the run has at least: all, or so many by chance."""
    pause_seconds: tuple[float, float] = (2.0, 6.0)
    """Seconds between two faults."""
    rest_seconds: float = 3.0
    """Seconds that a service must be up before its next fault."""
    spares_one: bool = False
    """Whether a fault needs the other service of the role to be up."""
    fleet_seconds: tuple[float, float] = (3.0, 8.0)
    """Seconds that a fault of the whole fleet lasts."""
    suspect_seconds: float = 3.0
    gone_seconds: float = 5.0
    lease_seconds: float = 10.0
    gateway_gone_seconds: float = 20.0
    """Seconds of silence after which one gateway closes the rows of the other: longer than that is stopped."""
    certificate_seconds: float = 40.0
    """Seconds that certificates are valid, renewed after half of them; 0: the fleet is in plain text."""
    rotate_seconds: float = 60.0
    """Seconds between the end of one rotation of the authority and the start of the next."""
    least_left_per_stage: int = 3
    longest_p99_pause_seconds: float = 1.0

    @property
    def stop_seconds(self) -> tuple[float, float]:
        """Seconds that a service is stopped: until its leases have expired and the registry has dropped it."""
        return self.lease_seconds + 0.5, self.lease_seconds + 3.0


def short(seed: int) -> Options:
    """Return the short form for `make test`: shorter time-outs, and more faults in the same time."""
    return Options(
        seed,
        seconds=24.0,
        num_streams=60,
        num_questions=24,
        num_clients=16,
        num_second_clients=3,
        num_embedding_clients=1,
        num_gateway_kinds=2,  # a gateway takes seconds to start again
        max_waiting=512,
        burst_size=0,  # on a busy machine its clients, in the process of a gateway, hold up heartbeats
        max_think_seconds=0.3,
        pause_seconds=(0.5, 2.0),
        rest_seconds=1.0,
        spares_one=True,  # on a busy machine a worker may take longer to start than requests wait
        fleet_seconds=(1.5, 3.0),
        suspect_seconds=1.5,
        gone_seconds=2.5,
        lease_seconds=4.0,
        gateway_gone_seconds=9.0,
        certificate_seconds=20.0,
        rotate_seconds=4.0,
        least_left_per_stage=1,
    )

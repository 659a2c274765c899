"""The simulated system and the actions on it. One harness is one seeded run of the whole system."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import control_plane.fleet.worker_links
import kv_transfer_svc.store
import tandem_runtime.kv.client
import tandem_runtime.kv.regions
import tandem_worker.kv_link
from tandem.v1 import types_pb2 as pb
from tests.kv_transfer_svc.simulation import invariants, virtual_time
from tests.kv_transfer_svc.simulation.calls import Channel
from tests.kv_transfer_svc.simulation.fleet import GATEWAY_HOST, PLACES, Fleet
from tests.kv_transfer_svc.simulation.gateway import Gateway
from tests.kv_transfer_svc.simulation.lives import Environment, KvLife, Life
from tests.kv_transfer_svc.simulation.network import Faults, Network
from tests.kv_transfer_svc.simulation.packets import SocketFolder
from tests.kv_transfer_svc.simulation.tokens import VOCABULARY
from tests.kv_transfer_svc.simulation.truth import Truth
from tests.kv_transfer_svc.simulation.virtual_loop import VirtualLoop
from tests.kv_transfer_svc.simulation.watched_machine import WatchedMachine

_STARTED_SECONDS = 3.0
_REST_SECONDS = 100
"""Longer than the last deadline, every lease, and the time that ended handles are remembered."""
_LINK_POLL_SECONDS = 1.0
"""How often workers poll for their KV service. At the real rate, half of all events would be polls."""
_MAX_DOWN = 3


class Harness:
    """Two hosts and a gateway; created by `new_harness`."""

    def __init__(self, around: Environment) -> None:
        self.around = around
        self.truth, self.loop, self.rng, self.network = around.truth, around.loop, around.rng, around.network
        self.fleet = Fleet(self.around)
        self.gateway = Gateway(self.around, self.fleet)
        self._documents = [self._tokens(32) for _ in range(3)]
        for place in PLACES:
            self.fleet.start(place)
        self.run(_STARTED_SECONDS)

    def _tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(number)]

    # --------------------------------------------------------------------------------------------- time passes

    def run(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds, self.truth.raise_if_violated)
        invariants.check_step(self.around, self.fleet, self.gateway)

    def come_to_rest(self) -> None:
        """Heal every fault, submit nothing more, let time pass; then nothing may be left."""
        self.heal()
        for place, life in self.fleet.lives.items():
            if life.process.is_stopped:
                self._wake(life)
            if life.process.is_dead:
                self.fleet.start(place)
        for _ in range(_REST_SECONDS):
            self.run(1.0)
        invariants.check_rest(self.around, self.fleet, self.gateway)

    # ------------------------------------------------------------------------------------------ the actions

    def submit(self) -> None:
        document = self.rng.choice(self._documents)
        prompt = document[: self.rng.randrange(0, 33)] + self._tokens(self.rng.randrange(1, 16))
        num_choices = 1 if self.rng.random() < 0.7 else self.rng.randrange(2, 4)
        seconds = self.rng.choice([0.2, 3.0, 15.0, 40.0])
        self.truth.counts["requests submitted"] += 1
        self.gateway.submit(prompt, self.rng.randrange(1, 12), num_choices, seconds)

    def cancel(self) -> None:
        if self.gateway.requests:
            self.gateway.cancel(self.rng.choice(list(self.gateway.requests)))

    def wait(self) -> None:
        self.run(self.rng.choice([0.1, 0.3, 1.0, 4.0]))

    def kill(self) -> None:
        if (life := self._someone(lambda life: not life.process.is_dead)) is not None and self._may_fail:
            self._count("killed", life)
            life.kill()

    def restart(self) -> None:
        if (life := self._someone(lambda life: life.process.is_dead)) is not None:
            self._count("restarted", life)
            self.fleet.start(life.info.worker_id)

    def kill_and_restart(self) -> None:
        """Restart before the control plane has noticed the death."""
        if (life := self._someone(lambda life: not life.process.is_dead)) is not None:
            self._count("killed", life)
            life.kill()
            self.fleet.start(life.info.worker_id)

    def stop(self) -> None:
        if (life := self._someone(lambda life: life.process.is_running)) is not None and self._may_fail:
            self._count("stopped", life)
            life.stop()

    def wake(self) -> None:
        if (life := self._someone(lambda life: life.process.is_stopped and not life.process.is_dead)) is not None:
            self._wake(life)

    def drain(self) -> None:
        """Drain a KV service, as before a restart."""
        life = self._someone(lambda life: isinstance(life, KvLife) and life.is_ready and life.process.is_running)
        if isinstance(life, KvLife) and self._may_fail:
            self._count("drained", life)
            life.process.call(life.store.drain)

    def break_connection(self) -> None:
        self.network.break_one()

    def separate(self) -> None:
        self.truth.counts["hosts separated"] += 1
        one, other = self.rng.sample([0, 1, GATEWAY_HOST], 2)
        self.network.separate(one, other)

    def disturb(self) -> None:
        """Set random network faults."""
        draw, choose = self.rng.random, self.rng.choice
        self.network.faults = Faults(
            lose=choose([0.0, 0.05, 0.3]),
            silence=choose([0.0, 0.02]),
            duplicate=choose([0.0, 0.2, 0.5]),
            slowest_seconds=choose([0.002, 0.05, 0.5]),
            duplicate_seconds=20 * draw(),
        )

    def heal(self) -> None:
        self.network.heal()

    # ------------------------------------------------------------------------------------------------ helpers

    @property
    def _may_fail(self) -> bool:
        return sum(not life.process.is_running for life in self.fleet.lives.values()) < _MAX_DOWN

    def _someone(self, is_wanted: Callable[[Life], bool]) -> Life | None:
        wanted = [life for life in self.fleet.lives.values() if is_wanted(life)]
        return self.rng.choice(wanted) if wanted else None

    def _wake(self, life: Life) -> None:
        self._count("woken", life)
        life.process.wake()

    def _count(self, what: str, life: Life) -> None:
        kind = "KV services" if isinstance(life, KvLife) else "workers"
        self.truth.counts[f"{kind} {what}"] += 1
        self.truth.note(f"{life.info.incarnation} is {what}")


ACTIONS: dict[str, int] = {
    "submit": 34,
    "wait": 12,
    "cancel": 6,
    "kill": 3,
    "kill_and_restart": 2,
    "restart": 8,
    "stop": 3,
    "wake": 5,
    "drain": 1,
    "break_connection": 4,
    "separate": 1,
    "disturb": 3,
    "heal": 4,
}
"""Relative weights of the actions."""


def _worker_channel(network: Network, info: pb.WorkerInfo, _: object, _most: int) -> Channel:
    return Channel(network, info.address)


@contextlib.contextmanager
def new_harness(seed: int) -> Iterator[Harness]:
    """Run a harness in which time, network, sockets and processes are simulated."""
    loop, rng = VirtualLoop(), random.Random(seed)  # type: ignore[abstract] # it has no sockets
    truth = Truth(loop.time)
    network = Network(loop, rng, truth.counts)
    network.on_violation = truth.violated
    sockets = SocketFolder(network)
    machine = type("WatchedMachine", (WatchedMachine,), {"truth": truth})
    packets = type("Packets", (), {"connect": staticmethod(sockets.connect)})
    with (
        virtual_time.installed(loop.time) as time,
        virtual_time.logs_checked(truth.violated),
        patch.object(kv_transfer_svc.store, "HandleMachine", machine),
        patch.object(tandem_worker.kv_link, "_POLL_SECONDS", _LINK_POLL_SECONDS),
        patch.object(tandem_runtime.kv.client, "open_channel", partial(Channel, network)),
        patch.object(control_plane.fleet.worker_links, "open_worker_channel", partial(_worker_channel, network)),
        patch.object(tandem_runtime.kv.regions, "PacketSocket", packets),
    ):
        harness = Harness(Environment(loop, rng, network, sockets, truth, time))
        try:
            yield harness
        finally:
            loop.end()
            harness.fleet.close()

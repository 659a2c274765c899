"""Regression tests for faults that the simulation found."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from unittest.mock import patch

import tandem_runtime.kv.client
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tandem_runtime.kv.client import KvClient
from tests.kv_transfer_svc.simulation import virtual_time
from tests.kv_transfer_svc.simulation.calls import Channel
from tests.kv_transfer_svc.simulation.network import Network
from tests.kv_transfer_svc.simulation.virtual_loop import Process, VirtualLoop


def test_a_call_that_is_to_be_repeated_on_a_closed_client_ends_as_unavailable() -> None:
    """Not as grpc's UsageError: a gateway disconnects from a dead KV service while releases and aborts run."""
    loop = VirtualLoop()  # type: ignore[abstract] # it has no sockets
    network = Network(loop, random.Random(1), Counter())
    process = Process("gateway", 0, loop)
    ends: list[object] = []

    async def release() -> None:
        client = KvClient("nobody:1", "gateway-1")
        loop.call_later(0.03, lambda: loop.create_task(client.close()))
        ends.append((await asyncio.gather(client.release_all(pb.KvHandle()), return_exceptions=True))[0])

    with (
        virtual_time.installed(loop.time),
        patch.object(tandem_runtime.kv.client, "open_channel", partial(Channel, network)),
    ):
        process.call(lambda: loop.create_task(release()))
        loop.run_until(20.0, lambda: None)
        loop.end()
    assert [type(end) for end in ends] == [Unavailable]

"""Two gateways share one port, and one can leave without failed requests."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from benchmarks.gateway.processes import Processes, native_request

_NUM_CLIENTS = 40
"""The kernel chooses for each: that one of two gateways gets none of them happens once in a trillion times."""


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="ports cannot be shared here")
def test_two_gateways_on_one_port_both_answer_and_one_may_leave(tmp_path: Path) -> None:
    with Processes(tmp_path / "processes") as processes:
        pair = [processes.gateway("--reuse-port") for _ in range(2)]
        processes.stand_in()
        clients = [_ask(processes.address, 1_000_000) for _ in range(_NUM_CLIENTS)]
        for client in clients:
            assert client.recv(12) == b"HTTP/1.1 200"
        served = [gateway.client_ports() & {client.getsockname()[1] for client in clients} for gateway in pair]
        assert all(served) and len(served[0]) + len(served[1]) == _NUM_CLIENTS
        for client in clients:
            client.close()
        pair[0].stop()
        base_url = "http://{}:{}".format(*processes.address)
        for _ in range(10):
            with httpx.Client(base_url=base_url, trust_env=False) as http:
                assert http.get("/v1/models").json()["data"]


def _ask(address: tuple[str, int], num_tokens: int) -> socket.socket:
    client = socket.create_connection(address, timeout=20)
    client.sendall(native_request(num_tokens))
    return client

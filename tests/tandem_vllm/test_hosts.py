"""Tests how the hosts of one engine find each other, compare what they have, and notice that one is gone."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_engine.errors import ModelUnusable
from tandem_engine.messages import AdapterInfo, ModelInfo
from tandem_engine.settings import EngineConfig
from tandem_vllm import hosts
from tandem_vllm.hosts import Fit, Followers, HostFailed, Loading, Network, identity_of, join, use_network
from tests.ports import free_ports

LOOPBACK = "127.0.0.1"
CONFIG = EngineConfig("@tandem/demo", engine_args=("--nnodes", "2"))
MODEL = ModelInfo(
    "m", "Llama", 1, "float32", "cpu", 10, 99, [0], {}, "", "weights", "", "float32", "tok", "class/2", {}
)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(hosts, "JOIN_SECONDS", 20.0)  # a test that fails ends
    with ThreadPoolExecutor(4) as pool:
        yield pool


def leader(threads: ThreadPoolExecutor, port: int, num_hosts: int = 2) -> Future[Followers]:
    return threads.submit(Followers.wait, CONFIG, Network(num_hosts, LOOPBACK, port), "vLLM 1", lambda *_: None)


def connected(port: int) -> socket.socket:
    """Connect to what will listen at a port."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((LOOPBACK, port))


def test_followers_get_the_settings_and_numbers_and_both_sides_notice_an_end(threads: ThreadPoolExecutor) -> None:
    [port] = free_ports(1)
    waiting = leader(threads, port, num_hosts=3)
    # 1. one caller is no follower, one has another version: both are turned away, and the leader goes on waiting
    with connected(port) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with pytest.raises(HostFailed, match="it has vLLM 2, and its leader vLLM 1"):
        join(LOOPBACK, port, "vLLM 2")
    # 2. two followers are numbered, and all get one address for torch's store
    calls = [threads.submit(join, LOOPBACK, port, "vLLM 1") for _ in range(2)]
    links, assigned = zip(*[call.result() for call in calls], strict=True)
    followers = waiting.result()
    assert [each.config for each in assigned] == [CONFIG, CONFIG]
    assert sorted(each.place.rank for each in assigned) == [1, 2]
    assert {each.place._replace(rank=0) for each in assigned} == {followers.place}
    assert followers.place.port == port + 1
    # 3. they have the same model
    for link in links:
        link.send(Loading(identity_of(MODEL)))
    followers.check(MODEL)
    for link in links:
        link.receive(Fit, 9.0)
    # 4. a follower ends: the leader is told, once, and by name
    told: queue.Queue[str] = queue.Queue()
    followers.watch(told.put)
    links[0].close()
    assert told.get(timeout=9) == f"host {LOOPBACK} of this engine is gone"
    # 5. the leader ends: the other follower is told
    links[1].watch(lambda: told.put("the leader"))
    for link in followers._links:
        link.close()
    assert "the leader" in {told.get(timeout=9), told.get(timeout=9)}


@pytest.mark.parametrize(
    "theirs",
    [
        {"weights_digest": "others"},
        {"numerics_class": "class/1"},
        {"adapters": [AdapterInfo("french", "digest")]},
    ],
)
def test_a_host_with_another_model_or_machine_is_refused_on_both_sides(
    theirs: dict[str, Any], threads: ThreadPoolExecutor
) -> None:
    [port] = free_ports(1)
    waiting = leader(threads, port)
    link, _ = join(LOOPBACK, port, "vLLM 1")
    link.send(Loading(identity_of(msgspec.structs.replace(MODEL, **theirs))))
    with pytest.raises(HostFailed, match="another model or another machine"):
        waiting.result().check(MODEL)
    with pytest.raises(HostFailed, match="and its leader weights"):
        link.receive(Fit, 9.0)


def test_waits_have_an_end_and_name_the_other_side(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    with pytest.raises(HostFailed, match=f"no leader answers at {LOOPBACK}:{port}"):
        join(LOOPBACK, port, "vLLM 1", seconds=0.0)
    # a follower that goes before it has loaded
    waiting = leader(threads, port)
    link, _ = join(LOOPBACK, port, "vLLM 1")
    link.close()
    with pytest.raises(HostFailed, match=f"host {LOOPBACK} of this engine cannot load the model"):
        waiting.result().check(MODEL)
    # nobody calls
    monkeypatch.setattr(hosts, "JOIN_SECONDS", 0.0)
    with pytest.raises(HostFailed, match=r"tandem_worker\.vllm_follower --leader"):
        leader(threads, port).result()
    # the port is taken
    with socket.create_server((LOOPBACK, port)), pytest.raises(HostFailed, match="--master-port"):
        leader(threads, port).result()


def test_the_network_is_that_of_the_leaders_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_network("localhost")
    assert os.environ["VLLM_HOST_IP"] in (LOOPBACK, "::1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={os.environ['GLOO_SOCKET_IFNAME']}" == "=lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # the operator's own value stays
    use_network(LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    with pytest.raises(ModelUnusable, match=r"no network interface of this host has --master-addr 192\.0\.2\.1"):
        use_network("192.0.2.1")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--leader", "here", "--vllm-python", sys.executable], "--leader"),
        (["--leader", "10.0.0.1:29501", "--vllm-python", "/nowhere/python"], "--vllm-python '/nowhere/python'"),
        (["--vllm-python", sys.executable], "--leader"),
    ],
)
def test_a_followers_command_refuses_wrong_flags_by_name(flags: list[str], named: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem_worker.vllm_follower", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and named in done.stderr.splitlines()[-1]


def test_a_followers_command_becomes_the_follower_in_vllms_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" && ls "$PYTHONPATH"\n')
    python.chmod(0o755)
    flags = ["--leader", "10.0.0.1:29501", "--vllm-python", str(python), "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(
        [sys.executable, "-m", "tandem_worker.vllm_follower", *flags], capture_output=True, text=True, check=True
    )
    command, *packages = done.stdout.splitlines()
    state = str(tmp_path / "state")
    assert command == f"-P -m tandem_vllm.follower --leader 10.0.0.1:29501 --state-dir {state}"
    assert packages == ["tandem_engine", "tandem_machine", "tandem_vllm"]

"""Runs the pods of the overlay `production`: account, tokens, first token, the end of each kind of pod under load."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from infra.kubernetes.manifests import Workload, parse, workloads
from infra.kubernetes.tools import render
from infra.kubernetes.validate import MANIFESTS, check
from tandem_engine.demo import checkpoint_path
from tests.control_plane.postgres import running_postgres
from tests.install.kubelet import Cluster, End, Pod, endpoints, pods_of
from tests.install.sandbox import Running, wait_until
from tests.install.streams import Load, first_token
from tests.install.told import say, told

NUM_STREAMS = 16
MAX_TOKENS = 600
_MOST_REPLICAS = 2
"""Of a workload: two are enough for one to take over from the other, and machines for tests are small."""
HTTP = 8642
_BEFORE_SIGTERM_SECONDS = 1.5
"""Streams of a gateway's end begin so long before SIGTERM."""
_SERVED_AS = "model"
"""The folder's name of production's model."""


def production(read_only: dict[str, Path], variables: dict[str, str]) -> None:
    documents = parse(render(MANIFESTS / "overlays" / "production"))
    assert check(documents) == []
    with ExitStack() as stack:
        cluster = Cluster(documents, read_only, variables)
        stack.callback(cluster.close)
        models = cluster.folder / "models"
        shutil.copytree(checkpoint_path(), models / _SERVED_AS)
        cluster.claims["models"] = models
        cluster.secrets["tandem-gateway"] = {
            "TANDEM_SECRET": os.urandom(32).hex(),
            "TANDEM_CONTROL_DATABASE_URL": stack.enter_context(_postgres(cluster)),
        }
        cluster.name("postgresql", cluster.node.address)
        by_name = {each.name: each for each in workloads(documents)}
        began = time.monotonic()
        fleet = _Fleet(cluster, by_name)
        fleet.start_gateways()
        fleet.make_tokens()
        fleet.start_workers()
        say(f"all pods are ready after {time.monotonic() - began:.1f} s")
        url = endpoints(fleet.gateways, HTTP)[0]
        seconds = first_token(cluster.node.run, url, fleet.token, _SERVED_AS)
        say(f"first token after {time.monotonic() - began:.1f} s, {seconds:.2f} s of it for the request")
        for pod in (fleet.gateways[0], fleet.workers["prefill"][0], fleet.workers["decode"][0]):
            all_probes_pass(pod)
        for name in ("prefill", "decode"):
            with told(f"production: a {name} pod ends under {NUM_STREAMS} streams, and a new one takes its place"):
                fleet.end_a_worker(name)
        with told("production: a KV service alone ends under load, and is started again"):
            fleet.end_a_kv_service()
        with told("production: a gateway ends under load"):
            fleet.end_a_gateway()
        with told("production: a used-up token is named"):
            fleet.use_a_token_up(by_name["decode"])


class _Fleet:
    """Production's pods, in the order of docs/install/kubernetes.md."""

    def __init__(self, cluster: Cluster, by_name: dict[str, Workload]) -> None:
        self._cluster = cluster
        self._by_name = by_name
        self.gateways: list[Pod] = []
        self.workers: dict[str, list[Pod]] = {}
        self.token = ""
        self._starting = ThreadPoolExecutor(8, "start")
        self._gateways_started: list[object] = []

    def start_gateways(self) -> None:
        """Start gateways, which wait for an account; create it."""
        self.gateways = pods_of(self._cluster, self._by_name["gateway"], _MOST_REPLICAS)
        self._gateways_started = [self._starting.submit(each.start) for each in self.gateways]
        first = self.gateways[0]
        wait_until(lambda: _waits_for_account(first), 60, "the wait for an account")
        made = first.running["account"].execute(
            ["/opt/tandem/bin/python", "-m", "control_plane", "account", "create", "ops"]
        )
        assert made.returncode == 0, made.stderr
        self.token = next(line.split()[-1] for line in made.stdout.splitlines() if line.startswith("token"))
        wait_until(
            lambda: all("gateway" in each.running for each in self.gateways), 60, "the end of the wait for an account"
        )

    def make_tokens(self, **environment: str) -> None:
        """Make join tokens by the script, with `kubectl exec` replaced."""
        gateway = self.gateways[0].running["gateway"]
        wait_until(lambda: self._is_alive(self.gateways[0]), 60, "the gateway's start")
        variables = [f"{name}={value}" for name, value in gateway.sandbox.environment.items()]
        execute = shlex.join([*gateway.entering(), "env", "-i", *variables])
        made = subprocess.run(
            [str(MANIFESTS / "join-tokens.sh")],
            env={"PATH": os.environ["PATH"], "EXEC": execute, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        secret = yaml.safe_load(made.stdout)
        assert all(value.startswith("tdj1") for value in secret["stringData"].values()), made.stdout
        self._cluster.secrets[secret["metadata"]["name"]] = secret["stringData"]

    def start_workers(self) -> None:
        for name in ("prefill", "decode"):
            self.workers[name] = pods_of(self._cluster, self._by_name[name], _MOST_REPLICAS)
        starts = [self._starting.submit(each.start) for pods in self.workers.values() for each in pods]
        for start in [*starts, *self._gateways_started]:
            start.result()  # type: ignore[attr-defined]

    def _is_alive(self, pod: Pod) -> bool:
        [gateway] = [each for each in pod.workload.containers if each.name == "gateway"]
        return pod.probe(gateway, gateway.raw["livenessProbe"])

    def end_a_worker(self, name: str) -> None:
        """End a pod under load. Then start another, with empty folders: a new member."""
        pod = self.workers[name].pop(0)
        load = self._load(endpoints(self.gateways, HTTP))
        ended_well(pod, pod.stop(), load)
        other = Pod(self._cluster, pod.workload, f"{name}-new")
        other.start()
        self.workers[name].append(other)

    def end_a_kv_service(self) -> None:
        pod = self.workers["decode"][0]
        load = self._load(endpoints(self.gateways, HTTP))
        kv = next(each for each in pod.workload.containers if each.is_sidecar)
        pod.running["kv"].terminate()
        code = pod.running["kv"].wait(60)
        pod.launch(kv)
        wait_until(lambda: pod.probe(kv, kv.raw["startupProbe"]), 60, "the KV service's start")
        failures = load.failures()
        say(f"{pod.name}/kv ended with {code} and serves again; failed streams: {failures}")
        assert (code, failures) == (0, [])

    def end_a_gateway(self) -> None:
        """A gateway that ends still serves whom it has, and whom its endpoint is known to; others go to the other."""
        pod, other = self.gateways
        [gateway] = [each for each in pod.workload.containers if each.name == "gateway"]
        stopping = self._starting.submit(pod.stop)
        wait_until(lambda: pod.is_ending, 5, "the end's begin")
        assert endpoints(self.gateways, HTTP) == [_url(other)]
        time.sleep(gateway.pre_stop_seconds - _BEFORE_SIGTERM_SECONDS)
        load = self._load([_url(pod)])  # SIGTERM comes while these run
        wait_until(lambda: not pod.probe(gateway, gateway.raw["readinessProbe"]), 10, "no readiness while it drains")
        say(f"not ready, and {load.num_running} of {len(load.streams)} streams still run on it")
        assert load.num_running > 0, "the streams were too short to show a drain"
        first_token(self._cluster.node.run, _url(other), self.token, _SERVED_AS)
        ended_well(pod, stopping.result(), load)

    def use_a_token_up(self, workload: Workload) -> None:
        """Of two pods with a token for one process, the second ends and says why."""
        kept = dict(self._cluster.secrets["tandem-join"])
        self.gateways[0], self.gateways[1] = self.gateways[1], self.gateways[0]
        self.make_tokens(USES="1", ROLES="kv")
        used = {**kept, **self._cluster.secrets["tandem-join"]}
        self._cluster.secrets["tandem-join"] = used
        kv = next(each for each in workload.containers if each.is_sidecar)
        first, second = Pod(self._cluster, workload, "decode-a"), Pod(self._cluster, workload, "decode-b")
        first.launch(kv)
        wait_until(lambda: first.probe(kv, kv.raw["startupProbe"]), 60, "the first member")
        refused: Running = second.launch(kv)
        code = refused.wait(90)
        say(f"the second ended with {code}: {refused.tail(1)}")
        assert code not in (None, 0)
        assert "token" in refused.tail(3)

    def _load(self, urls: Sequence[str]) -> Load:
        spread = [urls[number % len(urls)] for number in range(NUM_STREAMS)]
        load = self._cluster.node.run(lambda: Load(spread, self.token, MAX_TOKENS, _SERVED_AS))
        load.began()
        return load


def _url(pod: Pod) -> str:
    return f"http://{pod.network.address}:{HTTP}"


def _waits_for_account(pod: Pod) -> bool:
    return "account" in pod.running and "There is no account" in pod.running["account"].tail()


@contextmanager
def _postgres(cluster: Cluster) -> Iterator[str]:
    """Run PostgreSQL on the machine, with an address that pods reach; yield the URL for them."""
    manager = running_postgres()
    server = cluster.node.run(manager.__enter__)
    try:
        url = cluster.node.run(server.new_database)
        listener = cluster.node.run(lambda: socket.create_server((cluster.node.address, 5432)))
        forward = threading.Thread(target=_forward, args=(listener, server.port), daemon=True)
        cluster.node.run(forward.start)  # a thread has the network of the one that starts it
        yield f"postgresql://tandem@postgresql:5432/{url.rpartition('/')[2]}"
        listener.close()
    finally:
        cluster.node.run(lambda: manager.__exit__(None, None, None))


def _forward(listener: socket.socket, port: int) -> None:
    """Pass connections on to PostgreSQL, which listens on loopback only, until the listener is closed."""
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        try:
            server = socket.create_connection(("127.0.0.1", port))
        except OSError:  # PostgreSQL has ended: a client is told so
            accepted.close()
            continue
        for source, target in ((accepted, server), (server, accepted)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one side has closed, and the other is told
        while data := source.recv(65_536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def all_probes_pass(pod: Pod) -> None:
    for container in pod.workload.containers:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if kind in container.raw:
                assert pod.probe(container, container.raw[kind]), f"{kind} of {pod.name}/{container.name}"


def ended_well(pod: Pod, ended: End, load: Load) -> None:
    """No stream failed, and each container ended by itself in time."""
    failures = load.failures()
    grace = pod.workload.pod["terminationGracePeriodSeconds"]
    tokens = sum(each.num_tokens for each in load.streams)
    say(f"{pod.name} ended within {ended.seconds:.1f} s of {grace} s, {dict(ended.exit_codes)}")
    say(f"{len(load.streams)} streams, {tokens} tokens, failed: {failures}")
    assert failures == [], failures
    assert set(ended.exit_codes.values()) == {0}, {n: r.tail(8) for n, r in pod.running.items()}
    assert ended.seconds < grace

"""Runs the manifests' containers as processes, as the manifests say: `python -m tests.install kubernetes`.

cpu-demo: first token, and the pod's end under load. production: two gateways on PostgreSQL, prefill and decode pods in
networks of their own; account and join tokens as docs/install/kubernetes.md says; the end of each kind of pod under 16
streams; a used-up token. Needs root (namespaces), bubblewrap, iproute2, PostgreSQL, kubectl.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from infra.kubernetes.manifests import parse, workloads
from infra.kubernetes.tools import render
from infra.kubernetes.validate import MANIFESTS, check
from tests.install.kubelet import Cluster, Pod
from tests.install.production import HTTP, MAX_TOKENS, NUM_STREAMS, all_probes_pass, ended_well, production
from tests.install.sandbox import kernels
from tests.install.streams import Load, first_token
from tests.install.told import all_held, say, told


def main() -> int:
    """Run all; return 0 if all held, 1 if something did not, or a program is missing."""
    return all_held(_run, "bwrap", "ip", "nsenter", "setpriv")


def _run() -> None:
    """Raises AssertionError with what did not hold."""
    with kernels() as (read_only, variables):
        with told("cpu-demo: all steps"):
            _cpu_demo(read_only, variables)
        with told("production: all steps"):
            production(read_only, variables)


def _cpu_demo(read_only: dict[str, Path], variables: dict[str, str]) -> None:
    documents = parse(render(MANIFESTS / "overlays" / "cpu-demo"))
    assert check(documents) == []
    cluster = Cluster(documents, read_only, variables)
    try:
        cluster.name("localhost", "127.0.0.1")
        [workload] = workloads(documents)
        began = time.monotonic()
        pod = Pod(cluster, workload, "tandem-0")
        pod.start()
        say(f"the pod is ready after {time.monotonic() - began:.1f} s")
        # kubectl port-forward connects inside the pod's network.
        url = f"http://127.0.0.1:{HTTP}"
        seconds = first_token(pod.network.run, url)
        say(f"first token after {time.monotonic() - began:.1f} s, {seconds:.2f} s of it for the request")
        all_probes_pass(pod)
        load = pod.network.run(lambda: Load([url] * NUM_STREAMS, "", MAX_TOKENS))
        load.began()
        ended_well(pod, pod.stop(), load)
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())

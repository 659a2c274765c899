"""Which processes make a Tandem on one machine, and what does each get of it?

A pure function: a machine and the options in, a list of processes out. Cores go to the workers' engines, evenly.
Threads that outnumber cores spin against each other, so each worker is told its cores and its number of threads. All
else (the control plane, the KV service, the workers' fronts) needs little, and stays off the cores of decode's engines.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_client.cli.configured import Configured, cores_in
from tandem_client.cli.machine import Machine

MAX_KV_BYTES_PER_WORKER = 2 << 30
KV_SHARE_OF_FREE_MEMORY = 0.2


@dataclass(frozen=True)
class UpOptions:
    """What the user asked of `tandem up`."""

    model: str | None = None
    served_model_name: str | None = None
    fallback_model: str | None = None
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 8642
    grpc_port: int = 8643
    config: Path | None = None
    insecure: bool = False
    verbose: bool = False
    operator_token: str = field(default="", repr=False)
    """What the progress asks for the fleet with, should there be accounts."""

    @property
    def url(self) -> str:
        """Where the gateway answers, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def control_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running. `role` is the word /v1/workers uses, "control" for the control plane."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    cores: tuple[int, ...] = field(default=())
    """Where a worker's engine computes; empty where that is not known, or there is none."""


def plan(machine: Machine, options: UpOptions, configured: Configured | None = None) -> list[ProcessSpec]:
    """Return the processes in the order they start: control plane, KV service, workers.

    What is `configured` elsewhere, a share of the machine does not replace.
    """
    shares = divide(machine, options.num_prefill + options.num_decode)
    names = _worker_names(options)
    workers = [
        _worker(name, role, share, (configured or {}).get(role, {}), options)
        for (name, role), share in zip(names, shares, strict=True)
    ]
    # Without a prefill worker nothing is handed over, and there is nothing for a KV service to hold.
    return [_control_plane(options), *([_kv_service(options)] if options.num_prefill else []), *workers]


def cores_beside_decode(machine: Machine, specs: Sequence[ProcessSpec]) -> tuple[int, ...]:
    """Return the cores for all that is no engine: those on which no answers are decoded. Empty: none in particular.

    On a core it shares with them a decode step waits for whoever carries the tokens of the step before, and for whoever
    tokenizes the next prompt: milliseconds that every reader sees. A prefill that waits as long is later by that much.
    An engine that is told no cores stays on its parent's: then nothing is kept off anywhere.
    """
    workers = [spec for spec in specs if spec.role in ("prefill", "decode")]
    if not all(worker.cores for worker in workers):
        return ()
    decoding = {core for worker in workers if worker.role == "decode" for core in worker.cores}
    return tuple(core for core in machine.cores if core not in decoding)


@dataclass(frozen=True)
class Share:
    """What one worker gets of the machine; `kv_limit_bytes` is None where it has a GPU to itself."""

    cores: tuple[int, ...]
    kv_limit_bytes: int | None
    gpu: str | None


def divide(machine: Machine, num_workers: int) -> list[Share]:
    """Divide a machine evenly; a worker with a GPU to itself finds its own KV memory there."""
    kv_bytes = None if len(machine.gpus) >= num_workers else kv_bytes_per_worker(machine.free_memory_bytes, num_workers)
    gpus = [machine.gpus[index % len(machine.gpus)] if machine.gpus else None for index in range(num_workers)]
    cores = divide_cores(machine.cores, num_workers)
    return [Share(own_cores, kv_bytes, gpu) for own_cores, gpu in zip(cores, gpus, strict=True)]


def divide_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Give each worker a run of neighbouring cores; where there are too few, workers share them in turn.

    >>> divide_cores([0, 1, 2, 3, 4], 2)
    [(0, 1, 2), (3, 4)]
    >>> divide_cores([0, 1], 3)
    [(0,), (1,), (0,)]
    """
    if len(cores) < num_workers:
        return [(cores[index % len(cores)],) for index in range(num_workers)]
    size, larger = divmod(len(cores), num_workers)
    starts = [index * size + min(index, larger) for index in range(num_workers + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def kv_bytes_per_worker(free_memory_bytes: int, num_workers: int) -> int:
    """Return 20 % of the free memory divided among the workers, 2 GiB at most for each, in whole MiB."""
    share = int(free_memory_bytes * KV_SHARE_OF_FREE_MEMORY) // num_workers
    return min(MAX_KV_BYTES_PER_WORKER, share) >> 20 << 20


def _worker_names(options: UpOptions) -> list[tuple[str, str]]:
    counts = (("prefill", options.num_prefill), ("decode", options.num_decode))
    return [(f"{role}-{index}", role) for role, count in counts for index in range(count)]


def _control_plane(options: UpOptions) -> ProcessSpec:
    host = f"[{options.host}]" if ":" in options.host else options.host
    flags = ["--listen", f"{host}:{options.port}", "--grpc-listen", options.control_address]
    if options.fallback_model is not None:
        flags += ["--fallback-model", options.fallback_model]
    if options.insecure:
        flags.append("--insecure")
    # By the environment, which only this user can read: a flag would show in every list of processes.
    environment = (("TANDEM_CONTROL_OPERATOR_TOKEN", options.operator_token),) if options.operator_token else ()
    return ProcessSpec("control-plane", "control", _command("control_plane", flags, options), environment)


def _kv_service(options: UpOptions) -> ProcessSpec:
    flags = ["--control", options.control_address, "--listen", "127.0.0.1:0", "--worker-id", "kv-service"]
    return ProcessSpec("kv-service", "kv", _command("kv_transfer_svc", flags, options))


def _worker(name: str, role: str, share: Share, configured: Mapping[str, object], options: UpOptions) -> ProcessSpec:
    flags = ["--control", options.control_address, "--listen", "127.0.0.1:0", "--worker-id", name]
    if options.model is not None:
        flags += ["--model", options.model]
    if options.served_model_name is not None:
        flags += ["--served-model-name", options.served_model_name]
    environment = {} if share.gpu is None else {"CUDA_VISIBLE_DEVICES": share.gpu}
    cores = cores_in(configured.get("cpus"))
    if not configured.keys() & {"cpus", "num_threads"}:
        cores = share.cores
        num_threads = str(len(share.cores))
        flags += ["--cpus", ",".join(map(str, share.cores)), "--num-threads", num_threads]
        environment["OMP_NUM_THREADS"] = num_threads
    if share.kv_limit_bytes is not None and not configured.keys() & {
        "kv_memory_limit_bytes",
        "kv_memory_bytes",
        "num_kv_blocks",
    }:
        flags += ["--kv-memory-limit-bytes", str(share.kv_limit_bytes)]
    command = _command(f"{role}_svc", flags, options)
    return ProcessSpec(name, role, command, tuple(environment.items()), cores)


def _command(module: str, flags: Sequence[str], options: UpOptions) -> tuple[str, ...]:
    config = ("--config", str(options.config)) if options.config else ()
    return (sys.executable, "-m", module, *flags, *config)

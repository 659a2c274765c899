"""Plans the processes of a Tandem on one machine, and each worker's share of cores, memory and GPUs.

`plan` is a pure function of the machine, the options and the settings. The engines get the cores, in equal shares. More
threads than cores would spin against each other, so each worker gets its cores and its number of threads. The control
plane, the KV service and the workers' gRPC processes need little; they stay off the cores that decode.
"""

from __future__ import annotations

import math
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem_client.cli.bounded_log import MAX_LOG_BYTES
from tandem_client.cli.placement import place_cores
from tandem_machine.cores import allowed_cores, num_usable_cores
from tandem_machine.memory import usable_memory
from tandem_machine.nodes import Node, nodes_of

DRAIN_SECONDS = 30.0
"""What `tandem up` gives workers and KV services to end, once no gateway has a request."""
DEVICE_SHARE = 0.9
"""Of a card's memory, for all engines on it together; the rest is for CUDA and for fragments."""
_LAST_PORT = 65_535
GATEWAY_STOP_SECONDS = 30.0
"""What a gateway gets beyond its time to drain: it writes errors, the ledger and its last events."""
_REQUEST_SECONDS = 600.0
"""The gateway's default for the longest that a request may take."""


@dataclass(frozen=True)
class UpOptions:
    """The flags of `tandem up`."""

    model: str | None = None
    served_model_name: str | None = None
    fallback_model: str | None = None
    embedding_models: tuple[str, ...] = ()
    """Encoders beside the model: for embeddings, classes or rankings; each has a worker of its own."""
    num_prefill: int = 1
    num_decode: int = 1
    vllm_python: str = ""
    """The interpreter of vLLM's environment, where vLLM computes; "": Tandem's own engine does."""
    host: str = "127.0.0.1"
    port: int = 8642
    grpc_port: int = 8643
    config: Path | None = None
    insecure_plaintext: bool = False
    """No certificates: all processes talk in plain text."""
    insecure_http: bool = False
    """HTTP beyond loopback in plain text."""
    verbose: bool = False
    max_log_bytes: int = MAX_LOG_BYTES
    operator_token: str = field(default="", repr=False)
    """The token for GET /v1/workers, needed if there are accounts."""

    @property
    def url(self) -> str:
        """The gateway's address, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def control_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def enrolment_port(self) -> int:
        """Where the processes get their certificates: what the control plane takes by itself."""
        return self.grpc_port + 1 if self.grpc_port < _LAST_PORT else self.grpc_port - 1


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running. `role` is the role in /v1/workers, or "control" for the control plane."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    cores: tuple[int, ...] = field(default=())
    """The cores of a worker's engine; empty if not known, or without an engine."""
    folder: str = ""
    """Where the process runs; "": where its supervisor does."""


def plan(machine: Machine, options: UpOptions, configured: Configured | None = None) -> list[ProcessSpec]:
    """Return the processes in the order they start: control plane, KV service, workers.

    Settings in `configured` override a worker's share of the machine.
    """
    shares, encoder_shares = _shares(machine, options)
    settings = configured or {}
    workers = [
        _worker(name, role, share, settings.get(role, {}), options)
        for (name, role), share in zip(_worker_names(options), shares, strict=True)
    ]
    encoders = [
        _encoder(f"encode-{index}", model, share, settings.get("encode", {}), options)
        for index, (model, share) in enumerate(zip(options.embedding_models, encoder_shares, strict=True))
    ]
    # Without a prefill worker there is no hand-over, so no KV service is needed.
    return [_control_plane(options), *([_kv_service(options)] if options.num_prefill else []), *workers, *encoders]


def _shares(machine: Machine, options: UpOptions) -> tuple[list[Share], list[Share]]:
    """Return the shares of the workers and those of the encoders.

    On a machine with fewer cores than engines, encoders share the cores that do not decode: streams keep their pace.
    """
    num_workers, num_encoders = options.num_prefill + options.num_decode, len(options.embedding_models)
    if len(machine.cores) >= num_workers + num_encoders:
        shares = divide(machine, num_workers + num_encoders)
        return shares[:num_workers], shares[num_workers:]
    shares = divide(machine, num_workers)
    beside_decode = dict.fromkeys(core for share in shares[: options.num_prefill] for core in share.cores)
    num_threads = sum(share.num_threads for share in shares[: options.num_prefill]) or len(machine.cores)
    cards = cards_of(machine, num_workers + num_encoders)
    encoders = [Share(tuple(beside_decode), num_threads, None, card, is_shared=True) for card in cards[num_workers:]]
    return [replace(share, card=card) for share, card in zip(shares, cards, strict=False)], encoders


def cores_beside_decode(machine: Machine, specs: Sequence[ProcessSpec]) -> tuple[int, ...]:
    """Return the cores for all processes but the engines: the cores that do not decode. Empty means all cores.

    On a shared core, a decode step waits while another process sends tokens or tokenizes a prompt. Such a wait adds
    milliseconds to the ITL of every stream; in prefill it only adds them once. If an engine has no cores of its own,
    it runs on the cores of its parent, and no core can be kept free.
    """
    workers = [spec for spec in specs if spec.role in ("prefill", "decode")]
    if not all(worker.cores for worker in workers):
        return ()
    decoding = {core for worker in workers if worker.role == "decode" for core in worker.cores}
    return tuple(core for core in machine.cores if core not in decoding)


@dataclass(frozen=True)
class Card:
    """A worker's GPU."""

    gpu: str
    """As named in CUDA_VISIBLE_DEVICES."""
    memory_share: float
    """The part of its memory for this worker."""


def cards_of(machine: Machine, num_engines: int) -> list[Card | None]:
    """Deal the GPUs to engines in turn; engines on one GPU get equal shares of `DEVICE_SHARE` of its memory."""
    gpus = machine.gpus
    if not gpus:
        return [None] * num_engines
    places = [index % len(gpus) for index in range(num_engines)]
    return [Card(gpus[place], math.floor(1000 * DEVICE_SHARE / places.count(place)) / 1000) for place in places]


@dataclass(frozen=True)
class Share:
    """One worker's share of the machine; `kv_limit_bytes` is None if the worker has a card, or a part of one."""

    cores: tuple[int, ...]
    """The cores to pin the worker to; empty: none."""
    num_threads: int
    kv_limit_bytes: int | None
    card: Card | None
    is_shared: bool = False
    """Other engines have the same cores."""


def divide(machine: Machine, num_workers: int) -> list[Share]:
    """Divide a machine evenly. A worker with a card sizes its KV memory by its share of the card."""
    cores = place_cores([node.cores for node in machine.nodes] or [machine.cores], num_workers)
    return [
        Share(
            own_cores if machine.is_pinned else (),
            len(own_cores),
            None if card else _kv_limit_bytes(machine, own_cores, cores),
            card,
        )
        for own_cores, card in zip(cores, cards_of(machine, num_workers), strict=True)
    ]


def _kv_limit_bytes(machine: Machine, own_cores: Sequence[int], cores: Sequence[Sequence[int]]) -> int:
    """Return the most KV memory of one worker; workers on one node share three fifths of its memory, too."""
    limit_bytes = kv_bytes_per_worker(machine.free_memory_bytes, len(cores))
    for node in machine.nodes:
        if node.total_bytes and set(own_cores) <= set(node.cores):
            num_workers = sum(set(others) <= set(node.cores) for others in cores)
            limit_bytes = min(limit_bytes, 3 * node.available_bytes // (5 * num_workers) >> 20 << 20)
    return limit_bytes


def kv_bytes_per_worker(free_memory_bytes: int, num_workers: int) -> int:
    """Return the most KV memory of each worker, in whole MiB: a fifth of what is free, three fifths for all together.

    A worker that is started by hand takes a fifth of what is free then. A small model takes less by itself.
    """
    return min(free_memory_bytes // 5, 3 * free_memory_bytes // (5 * num_workers)) >> 20 << 20


def _worker_names(options: UpOptions) -> list[tuple[str, str]]:
    counts = (("prefill", options.num_prefill), ("decode", options.num_decode))
    return [(f"{role}-{index}", role) for role, count in counts for index in range(count)]


def _control_plane(options: UpOptions) -> ProcessSpec:
    host = f"[{options.host}]" if ":" in options.host else options.host
    flags = ["--listen", f"{host}:{options.port}", "--grpc-listen", options.control_address]
    if options.insecure_http:
        flags.append("--insecure-http")
    if options.fallback_model is not None:
        flags += ["--fallback-model", options.fallback_model]
    # Only this user can read the environment; a flag is visible to all in the list of processes.
    environment: list[tuple[str, str]] = []
    if options.operator_token:
        environment.append(("TANDEM_CONTROL_OPERATOR_TOKEN", options.operator_token))
    return ProcessSpec("control-plane", "control", _command("control_plane", flags, options), tuple(environment))


def _kv_service(options: UpOptions) -> ProcessSpec:
    flags = ["--control", options.control_address, "--listen", "127.0.0.1:0", "--worker-id", "kv-service"]
    return ProcessSpec("kv-service", "kv", _command("kv_transfer_svc", flags, options))


def _encoder(name: str, model: str, share: Share, configured: Mapping[str, object], options: UpOptions) -> ProcessSpec:
    flags = ["--control", options.control_address, "--listen", "127.0.0.1:0", "--worker-id", name, "--model", model]
    more, environment, cores = _cores_of(share, configured)
    background = ["--background"] if share.is_shared and "background" not in configured else []
    command = _command("encode_svc", [*flags, *more, *background], options)
    return ProcessSpec(name, "encode", command, tuple(environment.items()), cores)


def _worker(name: str, role: str, share: Share, configured: Mapping[str, object], options: UpOptions) -> ProcessSpec:
    flags = ["--control", options.control_address, "--listen", "127.0.0.1:0", "--worker-id", name]
    if options.model is not None:
        flags += ["--model", options.model]
    if options.served_model_name is not None:
        flags += ["--served-model-name", options.served_model_name]
    if options.vllm_python:
        flags += ["--engine", "vllm", "--vllm-python", options.vllm_python]
    more, environment, cores = _cores_of(share, configured)
    flags += more
    if share.kv_limit_bytes is not None and not configured.keys() & {
        "kv_memory_limit_bytes",
        "kv_memory_bytes",
        "num_kv_blocks",
    }:
        flags += ["--kv-memory-limit-bytes", str(share.kv_limit_bytes)]
    if share.card is not None and "device_memory_share" not in configured:
        flags += ["--device-memory-share", str(share.card.memory_share)]
    command = _command(f"{role}_svc", flags, options)
    return ProcessSpec(name, role, command, tuple(environment.items()), cores)


def _cores_of(share: Share, configured: Mapping[str, object]) -> tuple[list[str], dict[str, str], tuple[int, ...]]:
    """Return flags, environment and cores of an engine: those of its settings, else its share."""
    environment = {}
    if share.card is not None:
        environment = {"CUDA_VISIBLE_DEVICES": share.card.gpu}
    if configured.keys() & {"cpus", "num_threads"}:
        return [], environment, cores_in(configured.get("cpus"))
    num_threads = str(share.num_threads)
    environment["OMP_NUM_THREADS"] = num_threads
    flags = ["--cpus", ",".join(map(str, share.cores))] if share.cores else []
    return [*flags, "--num-threads", num_threads], environment, share.cores


def _command(module: str, flags: Sequence[str], options: UpOptions) -> tuple[str, ...]:
    plaintext = ("--insecure-plaintext",) if options.insecure_plaintext else ()
    config = ("--config", str(options.config)) if options.config else ()
    return (sys.executable, "-m", module, *flags, *plaintext, *config)


ROLES = ("prefill", "decode", "encode", "kv", "control")


Configured = Mapping[str, Mapping[str, object]]
"""By role, the settings from the settings file or the environment: text, or a value of TOML."""


def configured_settings(config: Path | None) -> Configured:
    """Return the settings by role. Raises ValueError if the file is missing or not TOML.

    The file is the one that the services read: `config`, else TANDEM_CONFIG, else tandem.toml in the current folder.
    """
    tables = _tables(config)
    return {role: _in_table(tables, role) | _in_environment(role) for role in ROLES}


def gateway_drain_seconds(configured: Configured) -> float:
    """Return how long the gateway lets its requests finish: as long as one may take, if nothing else is set."""
    control = configured.get("control", {})
    for name in ("drain_seconds", "request_timeout_seconds"):
        try:
            return max(0.0, float(str(control[name])))
        except (KeyError, ValueError):  # a value that is no number is refused by the gateway
            continue
    return _REQUEST_SECONDS


def cores_in(value: object) -> tuple[int, ...]:
    """Parse `cpus`, "0,1" or [0, 1]. Returns () for anything else, which the worker then refuses by name."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else ()
    try:
        return tuple(int(item) for item in items)
    except (TypeError, ValueError):
        return ()


def _tables(config: Path | None) -> Mapping[str, object]:
    named = config or (Path(os.environ["TANDEM_CONFIG"]) if os.environ.get("TANDEM_CONFIG") else None)
    path = named or Path("tandem.toml")
    if not path.is_file():
        if named:
            raise ValueError(f"there is no settings file {named}")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the settings file {path} is not TOML: {error}") from error


def _in_table(tables: Mapping[str, object], role: str) -> dict[str, object]:
    table = tables.get(role, {})
    return dict(table) if isinstance(table, dict) else {}


def _in_environment(role: str) -> dict[str, object]:
    prefix = f"TANDEM_{role.upper()}_"
    return {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Machine:
    """The usable cores, the free memory, and the GPUs as named in CUDA_VISIBLE_DEVICES."""

    cores: tuple[int, ...]
    free_memory_bytes: int
    gpus: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    """The NUMA nodes of `cores`, each with these cores alone; empty on a machine with one node, and if not pinned."""
    is_pinned: bool = True
    """Whether engines get cores of their own. False under a CPU quota smaller than the allowed cores: a quota names no
    cores, so every container of the machine would choose the same; `cores` then only counts."""

    def __post_init__(self) -> None:
        assert self.cores, "a machine that runs this has a core"


def this_machine() -> Machine:
    """Return this machine, as far as this process may use it: affinity, CPU quota, memory limit."""
    allowed, num_usable = allowed_cores(), num_usable_cores()
    is_pinned = num_usable == len(allowed)
    nodes = nodes_of(allowed) if is_pinned else ()
    return Machine(allowed[:num_usable], usable_memory().available_bytes, usable_gpus(), nodes, is_pinned=is_pinned)


def usable_gpus() -> tuple[str, ...]:
    """Return the usable NVIDIA GPUs: those in CUDA_VISIBLE_DEVICES, else all GPUs of the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index in range(len(list(folder.iterdir())) if folder.is_dir() else 0))

"""The settings of a worker, and the part of them that its engine process receives."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from tandem_engine.client import Program
from tandem_engine.settings import EngineConfig
from tandem_runtime import plaintext_settings
from tandem_runtime.model_table import SHIPPED, Exactness, ModelTable
from tandem_runtime.plaintext_settings import PlaintextSettings
from tandem_runtime.settings import setting
from tandem_worker.vllm_program import vllm_program


@dataclass(frozen=True)
class EngineSettings(PlaintextSettings):
    """Settings of every worker; each field is a flag, a variable and a key of tandem.toml."""

    model: str = setting(
        "@tandem/demo", "model to serve: folder or Hub id of a checkpoint, or a name from the model table", shared=True
    )
    served_model_name: str = setting("", "model name for clients; the folder name or Hub id if empty", shared=True)
    models: ModelTable = setting(SHIPPED, "the model table: names and their checkpoints", shared=True, file_only=True)
    control: tuple[str, ...] = setting(
        ("127.0.0.1:8643",), "gRPC addresses of the control plane processes", shared=True
    )
    listen: str = setting("127.0.0.1:0", "address of the gRPC server; port 0 selects a free port")
    advertise: str = setting("", "address that other processes connect to; the listen address if empty")
    insecure: bool = plaintext_settings.insecure()
    tls_cert: str = setting(
        "",
        "PEM file of this process's certificate, leaf first; with --tls-key and --tls-ca, gRPC is encrypted and both "
        "sides are verified",
    )
    tls_key: str = setting("", "PEM file of the private key of --tls-cert")
    tls_ca: str = setting("", "PEM file of the trusted certificate authorities, one or two")
    join: str = setting(
        "",
        "join token of `tandem fleet token`, to get a certificate at the first start; pass it by variable",
        secret=True,
    )
    join_file: str = setting(
        "", "file with a join token; if empty, the one that a gateway of this machine writes into its state directory"
    )
    insecure_plaintext: bool = plaintext_settings.insecure_plaintext()
    plaintext_until: str = plaintext_settings.plaintext_until()
    grpc_reflection: bool = setting(
        False, "describe the gRPC methods to those who may call them, for tools such as grpcurl", shared=True
    )
    host_id: str = setting("", "name of this host; several names make one machine act as several hosts", shared=True)
    worker_id: str = setting("", "stable name of this worker; from role, host, process id and incarnation if empty")
    device: str = setting("auto", "device of the model: auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "number format of the computation")
    kernels: Literal["auto", "cpp", "torch"] = setting(
        "auto",
        "kernels on a CPU: C++ (of the platform wheel, else compiled at the first start), or plain torch, several "
        "times slower",
    )
    num_threads: int | None = setting(None, "threads of the engine; the number of its cores if unset")
    cpus: tuple[int, ...] = setting((), "cores that the engine process is pinned to; all allowed cores if empty")
    engine_timeout_seconds: float = setting(
        10.0, "seconds without an answer and without processor time of the engine, after which its requests move on"
    )
    drain_seconds: float = setting(120.0, "most seconds for running requests to finish after SIGTERM")
    state_dir: str = setting(
        "", "folder of certificates, digests and caches; the XDG state directory if empty", shared=True
    )
    loop_stall_seconds: float = setting(
        0.05,
        "seconds that the event loop may stand still before a log line names the code that stopped it; 0: never",
        shared=True,
    )
    log_json: bool | None = setting(None, "log JSON lines; if unset, unless stderr is a terminal", shared=True)
    metrics_listen: str = setting(
        "127.0.0.1:0",
        "address of the metrics (GET /metrics); port 0 takes a free one; beyond loopback over TLS; off if empty",
        shared=True,
    )
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    def __post_init__(self) -> None:
        if self.engine_timeout_seconds <= 0:
            raise ValueError(f"--engine-timeout-seconds {self.engine_timeout_seconds:g} must be more than 0")
        _ = self.plaintext_until_unix_seconds  # raises ValueError at start rather than later

    def engine_config(self, state_dir: str, region_id: str) -> EngineConfig:
        """Return the settings of the engine process; fields with equal names have equal values.

        Raises ValueError naming the field, its value and its limits.
        """
        ours = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {name: ours[name] for name in EngineConfig.__struct_fields__ if name in ours and name != "engine_args"}
        return EngineConfig(**{**taken, **self._checkpoint(), "state_dir": state_dir, "region_id": region_id})

    def engine_program(self, state_dir: str) -> Program:
        """Return the program of the engine process."""
        return Program.own()

    def _checkpoint(self) -> dict[str, Any]:
        """Return the model table's entry for a model requested by name; settings of this worker take precedence."""
        entry = self.models.find(self.model)
        if entry is None:
            return {}
        return {
            "model": entry.source or self.model,
            "revision": entry.revision,
            "served_model_name": self.served_model_name or entry.name,
            "dtype": entry.dtype if self.dtype == "auto" else self.dtype,
        }


@dataclass(frozen=True)
class WorkerSettings(EngineSettings):
    """Settings of a prefill or decode worker."""

    engine: Literal["tandem", "vllm"] = setting(
        "tandem",
        "engine that computes: Tandem's own, or vLLM in a virtual environment, in decode workers that prefill too",
    )
    vllm_python: str = setting(
        "", "path of the Python interpreter of vLLM's virtual environment, for the engine vllm", shared=True
    )
    engine_args: str = setting(
        "",
        "flags for vLLM, as in a shell: --engine-args='--quantization fp8'; those that break a promise of Tandem are "
        "refused",
    )
    adapters: tuple[str, ...] = setting(
        (),
        "LoRA adapters that vLLM loads, each NAME=PATH of a folder in peft's format; clients write MODEL:NAME, or send "
        "the name as lora",
    )
    route: Literal["auto", "lean", "transformers"] = setting(
        "auto",
        "implementation of the model: Tandem's own (lean) or transformers; auto: lean if it has the model family",
    )
    exactness: Literal["auto", "class", "layout"] = setting(
        "auto",
        "workers of the model that share KV blocks: those of one numerics class and layout (class), or all whose "
        "layouts can be converted, with answers that are close but not equal (layout); auto: the model table's",
    )
    numerics_tag: str = setting(
        "",
        "added to the name of the numerics class: for operators who build kernels of their own, which round in another "
        "way, and for tests of upgrades",
    )
    max_model_len: int | None = setting(None, "most tokens of prompt and answer together; the model's limit if unset")
    block_size: int = setting(16, "tokens per KV block", shared=True)
    num_kv_blocks: int | None = setting(None, "number of KV blocks in the pool; derived from free memory if unset")
    kv_memory_bytes: int | None = setting(None, "size of the KV pool in bytes; derived from free memory if unset")
    kv_memory_limit_bytes: int | None = setting(None, "upper limit, in bytes, of a pool derived from free memory")
    device_memory_share: float = setting(
        0.9,
        "part of a card's memory that this worker may take in all: weights, working memory, and the KV pool; workers "
        "on one card need shares that add up to less than 1",
    )
    kv_staging: Literal["auto", "always"] = setting(
        "auto",
        "whether others read copies of KV blocks in a region of --kv-staging-bytes: where they cannot read the pool "
        "(auto), or always, for tests on a CPU",
    )
    kv_staging_bytes: int | None = setting(
        None, "size of the host memory for those copies; 1 GiB if unset, and never more than the pool"
    )
    max_num_batched_tokens: int = setting(512, "tokens computed per step, prefill chunks and decodes together")
    max_prefill_tokens_with_decodes: int = setting(
        64, "prompt tokens in a step that also has decodes; a step without decodes has the whole budget for prompts"
    )
    max_prefill_context_with_decodes: int = setting(
        1 << 20,
        "most tokens of a prompt's chunk times tokens of its context, in a step that also has decodes; chunks of 64 "
        "tokens become smaller behind a context of more than 16,384",
    )
    max_num_seqs: int = setting(64, "requests that run at once")
    speculation: Literal["auto", "off"] = setting(
        "auto", "whether draft tokens run with answers while enough of them are accepted; no token changes"
    )
    max_draft_tokens: int = setting(8, "draft tokens of one answer in one step, at most; 1 to 32")
    draft_model: str = setting(
        "", "folder or Hub id of a smaller model of the same tokenizer that proposes draft tokens; none if empty"
    )
    overlap: Literal["auto", "on", "off"] = setting(
        "auto",
        "whether the engine handles commands and plans the next step while a step runs; no token changes; auto: on for "
        "CUDA",
    )
    max_num_waiting: int = setting(256, "most requests in the queue; further requests are refused with 429")
    prompt_grants: bool = setting(
        False,
        "a prefill worker divides half a second of computing among the gateways, by what waits there; without that, "
        "each sends it a second of prompts by its own estimate",
    )
    kv_transport: Literal["auto", "shm", "grpc"] = setting(
        "auto", "transport of KV blocks to this worker: shared memory, or a gRPC stream from its KV service"
    )
    kv_region: Literal["host", "device"] = setting(
        "host",
        "memory that decode workers of this host map: shared host memory, or the pool itself in the memory of an "
        "NVIDIA card (device), from which other hosts and the store get nothing",
    )
    prompt_cache: bool = setting(
        True, "read prompt prefixes from the KV service's store, and publish computed blocks to it"
    )
    verify_kv: bool = setting(
        False, "compute checksums of KV blocks, and verify those of blocks from other processes", shared=True
    )
    verify_weights: bool = setting(
        False,
        "compare the packed weights in the state directory with their checksums at start, and write damaged ones again",
    )
    lease_seconds: float = setting(10.0, "seconds that KV blocks stay reserved for a reader without a heartbeat")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "tandem":
            if self.engine_args:
                raise ValueError("--engine-args is for vLLM, the engine is tandem; leave it out or take --engine vllm")
            if self.adapters:
                raise ValueError(
                    "--adapters is for vLLM, the engine is tandem, without LoRA; leave it out or take --engine vllm"
                )
        elif not Path(self.vllm_python).is_file():
            raise ValueError(
                f"--engine vllm needs the Python interpreter of vLLM's virtual environment, and --vllm-python "
                f"{self.vllm_python!r} is no file; give its path, for example /opt/vllm/bin/python"
            )

    def engine_config(self, state_dir: str, region_id: str) -> EngineConfig:
        config = super().engine_config(state_dir, region_id)
        return replace(config, engine_args=tuple(shlex.split(self.engine_args)))

    def engine_program(self, state_dir: str) -> Program:
        return vllm_program(self.vllm_python, Path(state_dir)) if self.engine == "vllm" else Program.own()

    @property
    def resolved_exactness(self) -> Exactness:
        """The flag, or the model table's entry for the model."""
        if self.exactness != "auto":
            return self.exactness
        entry = self.models.find(self.model)
        return entry.exactness if entry is not None else "class"

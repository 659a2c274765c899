"""What can be set on a worker, and what of it does its engine process get?"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from tandem_engine.settings import EngineConfig
from tandem_runtime.model_table import SHIPPED, ModelTable
from tandem_runtime.settings import setting


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a prefill or decode worker; each field is a flag, a variable and a key of tandem.toml."""

    model: str = setting(
        "@tandem/demo", "what to serve: the folder or Hub id of a checkpoint, or the name of a model", shared=True
    )
    served_model_name: str = setting("", "name clients use instead of the folder name or Hub id", shared=True)
    models: ModelTable = setting(SHIPPED, "which checkpoints are behind names", shared=True, file_only=True)
    control: tuple[str, ...] = setting(
        ("127.0.0.1:8643",), "gRPC addresses of the control plane's processes", shared=True
    )
    listen: str = setting("127.0.0.1:0", "address the gRPC server listens on; port 0 takes a free one")
    advertise: str = setting("", "address that others dial, where it differs from the one listened on")
    insecure: bool = setting(False, "allow listening beyond loopback without TLS", shared=True)
    host_id: str = setting("", "name of this host; lets one machine play several", shared=True)
    worker_id: str = setting("", "stable name of this worker; made from role, host and process id if empty")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "numbers the model computes in")
    route: Literal["auto", "lean", "transformers"] = setting(
        "auto", "whose code runs the model: Tandem's own where it knows the family, or transformers'"
    )
    kernels: Literal["auto", "cpp", "torch"] = setting(
        "auto", "what computes on a CPU: C++ compiled on this machine, or plain torch, which is several times slower"
    )
    max_model_len: int | None = setting(None, "longest prompt and answer together, in tokens; the model's own if unset")
    block_size: int = setting(16, "tokens per KV block", shared=True)
    num_kv_blocks: int | None = setting(None, "KV blocks in the pool; sized from memory if unset")
    kv_memory_bytes: int | None = setting(None, "bytes of the KV pool; sized from free memory if unset")
    kv_memory_limit_bytes: int | None = setting(None, "most that a pool sized from free memory may take, in bytes")
    max_num_batched_tokens: int = setting(512, "tokens computed per step, prefill chunks and decodes together")
    itl_target_ms: float = setting(
        0.0, "longest gap between two tokens that prompt chunks beside them may cause, in milliseconds; 0: no limit"
    )
    max_num_seqs: int = setting(64, "requests that run at once")
    speculation: Literal["auto", "off"] = setting(
        "auto", "whether tokens of answers are guessed ahead where that pays; it changes no token"
    )
    max_draft_tokens: int = setting(8, "tokens guessed ahead of one answer in one step, at most; 1 to 32")
    draft_model: str = setting(
        "", "folder or Hub id of a smaller model of the same tokenizer that guesses tokens ahead, too; none if empty"
    )
    max_num_waiting: int = setting(256, "requests that may queue; more are refused with 429")
    num_threads: int | None = setting(None, "threads of the engine; the number of its cores if unset")
    cpus: tuple[int, ...] = setting((), "cores the engine process is pinned to; all it may use if empty")
    kv_transport: Literal["auto", "shm", "grpc"] = setting(
        "auto", "how KV bytes reach this worker: shared memory, or a gRPC stream from its KV service"
    )
    prompt_cache: bool = setting(
        True, "take the beginnings of prompts from the KV service's store, and offer it what is computed here"
    )
    verify_kv: bool = setting(
        False, "give every KV block a checksum, and verify those of blocks that come from elsewhere", shared=True
    )
    lease_seconds: float = setting(10.0, "how long KV blocks stay reserved for a reader that is not heard of")
    drain_seconds: float = setting(120.0, "how long running requests may take to finish after SIGTERM")
    state_dir: str = setting("", "where digests and caches are kept; XDG state directory if empty", shared=True)
    log_json: bool | None = setting(None, "log JSON lines; decided by the terminal if unset", shared=True)
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces and metrics; off if empty", shared=True)

    def engine_config(self, state_dir: str, region_id: str) -> EngineConfig:
        """Return the part of the settings that the engine process needs; fields of the same name are the same.

        Raises ValueError naming the field, its value and its limits.
        """
        ours = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {field.name: ours[field.name] for field in fields(EngineConfig) if field.name in ours}
        return EngineConfig(**{**taken, **self._checkpoint(), "state_dir": state_dir, "region_id": region_id})

    def _checkpoint(self) -> dict[str, Any]:
        """Return what the table says of a model that was asked for by name; what was said to this worker goes first."""
        entry = self.models.find(self.model)
        if entry is None:
            return {}
        return {
            "model": entry.source or self.model,
            "revision": entry.revision,
            "served_model_name": self.served_model_name or entry.name,
            "dtype": entry.dtype if self.dtype == "auto" else self.dtype,
        }

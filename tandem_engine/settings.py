"""What does an engine process need to know before it starts?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem_engine.scheduling.scheduler_config import MAX_DRAFT_TOKENS

Device = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
Route = Literal["auto", "lean", "transformers"]
Speculation = Literal["auto", "off"]
Kernels = Literal["auto", "cpp", "torch"]


@dataclass(frozen=True)
class EngineConfig:
    """Plain values, given once; what is found at load (number of blocks, EOS ids) is in `Ready`, never here.

    Raises ValueError that names the field, its value and its limits.
    """

    model: str
    """A folder, a Hub id, or "@tandem/demo"."""
    revision: str = ""
    """Branch, tag or commit of a Hub id; empty: its main branch."""
    served_model_name: str = ""
    """Empty: the Hub id, the folder's name, or "@tandem/demo"."""
    device: Device = "auto"
    """auto: CUDA where there is one, else the CPU."""
    dtype: DtypeChoice = "auto"
    """auto: the checkpoint's on CUDA, float32 on a CPU."""
    route: Route = "auto"
    """auto: our own code for the families it knows, on a CPU; else transformers'."""
    kernels: Kernels = "auto"
    """auto: C++ on a CPU where there is a compiler, else torch."""
    max_model_len: int | None = None
    """Longest context in tokens; None: what the checkpoint was made for."""
    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """Size of the KV pool in blocks; wins over `kv_memory_bytes`."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool in bytes; None: by the device's free memory."""
    kv_memory_limit_bytes: int | None = None
    """Most that a pool sized by free memory may take; None: on a CPU 2 GiB."""
    max_num_batched_tokens: int = 512
    """Token budget of one step; a step of decodes waits for the prompt chunk beside them."""
    itl_target_ms: float = 0.0
    """Prompt chunks are cut so that a step with answers in it takes no longer, if the chunk can help it; 0: not cut."""
    max_num_seqs: int = 64
    """Requests in one step."""
    speculation: Speculation = "auto"
    """auto: tokens of answers are guessed ahead where that pays, by measurement; no token changes. off: never."""
    max_draft_tokens: int = 8
    """Tokens guessed ahead of one answer in one step, at most."""
    draft_model: str = ""
    """A second, smaller model that guesses, too, while that pays: as `model`, of the same vocabulary; empty: none."""
    max_num_waiting: int = 256
    """Requests in the queue before the next is refused."""
    verify_kv: bool = False
    """Give every block a checksum when it is full, and compare those of blocks that come from elsewhere."""
    num_threads: int | None = None
    """Torch threads; None: one per core in `cpus`, or of this process's affinity."""
    cpus: tuple[int, ...] = ()
    """Cores to stay on; empty: all that this process may use."""
    state_dir: str = ""
    """Where digests are cached; empty: nowhere."""
    region_id: str = ""
    """Name of the pool's region among its readers; the worker's incarnation, usually."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError('model is empty; give a folder, a Hub id or "@tandem/demo"')
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_num_waiting"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_kv_blocks", "kv_memory_bytes", "kv_memory_limit_bytes", "num_threads"):
            if (value := getattr(self, name)) is not None:
                _at_least(name, value, 1)
        if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens}, must be from 1 to {MAX_DRAFT_TOKENS}")
        if not self.itl_target_ms >= 0:
            raise ValueError(f"itl_target_ms is {self.itl_target_ms}, must be at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs, "
                f"{self.max_num_seqs}: every running request takes a token per step"
            )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} is {value}, must be at least {low}")

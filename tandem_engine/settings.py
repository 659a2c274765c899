"""Defines the settings that an engine process gets at its start."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tandem_engine.scheduling.scheduler_config import MAX_DRAFT_TOKENS

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
Route = Literal["auto", "lean", "transformers"]
Speculation = Literal["auto", "off"]
Staging = Literal["auto", "always"]
Kernels = Literal["auto", "cpp", "torch"]
Overlap = Literal["auto", "on", "off"]


class EngineConfig(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Settings of one engine process. Facts found at load (number of blocks, EOS ids) are in `Ready`, never here.

    Raises ValueError that names the field, its value and its limits.
    """

    model: str
    """A folder, a Hub id, or "@tandem/demo"."""
    revision: str = ""
    """Branch, tag or commit of a Hub id; empty: its main branch."""
    served_model_name: str = ""
    """Empty: the Hub id, the folder's name, or "@tandem/demo"."""
    device: str = "auto"
    """auto: CUDA if the machine has it, else the CPU; or cpu, cuda, cuda:N."""
    dtype: DtypeChoice = "auto"
    """auto: the checkpoint's on CUDA, float32 on a CPU."""
    route: Route = "auto"
    """auto: our own code for the families it knows, on a CPU; else the code of transformers."""
    kernels: Kernels = "auto"
    """auto: C++ on a CPU, of the platform wheel or compiled here, else torch. cpp: fail without C++."""
    numerics_tag: str = ""
    """Added to the name of the numerics class, for kernels that others built: letters, digits, `.`, `_`, `-`."""
    max_model_len: int | None = None
    """Longest context in tokens; None: the checkpoint's."""
    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """Size of the KV pool in blocks; wins over `kv_memory_bytes`."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool in bytes; None: by the device's free memory."""
    kv_memory_limit_bytes: int | None = None
    """Largest pool when free memory decides its size; None: a fifth of what is free on a CPU."""
    device_memory_share: float = 0.9
    """Part of a CUDA device's memory that this process may take in all: weights, working memory, KV pool."""
    kv_staging: Staging = "auto"
    """auto: others read copies of blocks where they cannot read the pool. always: also on a CPU, for tests."""
    kv_staging_bytes: int | None = None
    """Size of the region that holds those copies; None: 1 GiB. Never more than the pool."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    max_prefill_tokens_with_decodes: int = 64
    """Prompt tokens in a step that also has decodes; a step without decodes has the whole budget for prompts."""
    max_prefill_context_with_decodes: int = 1 << 20
    """The same tokens, each times the length of its context: behind a long context, chunks are smaller."""
    max_num_seqs: int = 64
    """Requests in one step."""
    speculation: Speculation = "auto"
    """auto: draft tokens run with answers while enough of them are accepted; no token changes. off: no drafts."""
    max_draft_tokens: int = 8
    """Draft tokens of one answer in one step, at most."""
    draft_model: str = ""
    """A smaller model of the same vocabulary that proposes drafts; a folder or Hub id, as `model`; empty: none."""
    overlap: Overlap = "auto"
    """on: commands are handled and the next step is planned while a step runs; no token changes. auto: on for CUDA."""
    max_num_waiting: int = 256
    """Requests in the queue before the next is refused."""
    verify_kv: bool = False
    """Compute a checksum of every full block, and compare the checksums of blocks that are copied into the pool."""
    verify_weights: bool = False
    """Compare packed weights with their checksums before they are used."""
    num_threads: int | None = None
    """Torch threads; None: one per core in `cpus`, or in this process's affinity."""
    cpus: tuple[int, ...] = ()
    """Cores that the process is pinned to; empty: all that it may use."""
    state_dir: str = ""
    """Folder for cached digests; empty: they are not cached."""
    is_background: bool = False
    """Compute only what others of the machine leave: for an engine that shares its cores."""
    encodes: bool = False
    """Whether the process serves an encoder, with the messages of `tandem_engine.encoder.messages`."""
    engine_args: tuple[str, ...] = ()
    """Flags for vLLM, where it is the engine (`tandem_vllm`); our own engine has none."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters for vLLM, each NAME=PATH of a folder in the format of peft; our own engine has none."""
    kv_region: Literal["host", "device"] = "host"
    """Where the memory is that readers map: shared host memory, or device memory by a descriptor of its driver."""
    region_id: str = ""
    """Name of the pool's region for its readers; usually the worker's incarnation."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError('model is empty; give a folder, a Hub id or "@tandem/demo"')
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ValueError(f"device is {self.device!r}, must be auto, cpu, cuda or cuda:N")
        if not 0 < self.device_memory_share <= 1:
            raise ValueError(f"device_memory_share is {self.device_memory_share}, must be above 0 and at most 1")
        if not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", self.numerics_tag):
            raise ValueError(
                f"numerics_tag is {self.numerics_tag[:80]!r}, must be up to 64 letters, digits, dots, hyphens and "
                "underscores"
            )
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_prefill_tokens_with_decodes",
            "max_prefill_context_with_decodes",
            "max_num_seqs",
            "max_num_waiting",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "max_model_len",
            "num_kv_blocks",
            "kv_memory_bytes",
            "kv_memory_limit_bytes",
            "kv_staging_bytes",
            "num_threads",
        ):
            if (value := getattr(self, name)) is not None:
                _at_least(name, value, 1)
        if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens}, must be from 1 to {MAX_DRAFT_TOKENS}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs, "
                f"{self.max_num_seqs}: every running request takes a token per step"
            )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} is {value}, must be at least {low}")

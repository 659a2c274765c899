"""Describes what simulated workers, hosts and links can do.

The profile of an H100 is a roofline, not a measurement: peak rates of NVIDIA's data sheet (H100 SXM: 989 TFLOPS dense
bf16, 3.35 TB/s, 80 GB), the shape of Llama 3.1 8B (8.03 billion parameters, 32 layers, 8 KV heads of 128, hidden size
4,096), and two assumed utilisations: 0.5 of the FLOPS for prompts, 0.75 of the bandwidth for answers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerProfile:
    """The speed and memory of one engine.

    A step takes `step_ms`, plus `answer_ms` for each running answer, plus `context_ms` for each token of their
    contexts, plus the prompt tokens in the step: `prompt_ms` each, and `prompt_context_ms` for each pair of a prompt
    token and a token before it.
    """

    step_ms: float
    answer_ms: float
    context_ms: float
    prompt_ms: float
    prompt_context_ms: float
    kv_tokens: int
    """Size of the pool."""
    bytes_per_token: int
    """Of the KV cache."""
    chunk_tokens: int = 8192
    """Prompt tokens of a step without answers."""
    chunk_tokens_with_answers: int = 512
    max_num_seqs: int = 256
    """Answers that run at once; others wait."""
    max_num_waiting: int = 256
    """Prompts in the queue; further ones are refused."""
    reports_cached_tokens: bool = False
    """Whether a load report counts the cached tokens of a waiting prompt as tokens in flight."""

    def __post_init__(self) -> None:
        if min(self.step_ms, self.prompt_ms) <= 0 or min(self.kv_tokens, self.chunk_tokens) < 1:
            raise ValueError(f"a step, a prompt token, a chunk and a pool must be more than 0: {self}")

    def prompt_seconds(self, num_computed: int, num_before: int) -> float:
        """Return the time of a prompt's tokens in its steps, without the steps' own `step_ms`."""
        pairs = num_computed * (num_before + num_computed / 2)
        return (num_computed * self.prompt_ms + pairs * self.prompt_context_ms) / 1000


@dataclass(frozen=True)
class FleetProfile:
    """Workers of one model on hosts, and what lies between them. Worker numbers: prefill workers, then decode workers.

    Prefill and decode workers are dealt to the hosts in turn, so that each host has some of both.
    """

    num_prefill: int
    num_decode: int
    prefill: WorkerProfile
    decode: WorkerProfile
    num_hosts: int = 1
    store_tokens: int = 0
    """Size of each host's block store; 0: there is none."""
    store_bytes_per_second: float = 5e9
    """From the host's store into a pool."""
    local_bytes_per_second: float = 20e9
    """A hand-over within a host."""
    link_bytes_per_second: float = 25e9
    """Into one host from all others."""
    link_seconds: float = 0.0002
    """Latency between two hosts."""
    hand_over_seconds: float = 0.004
    """From the end of a prefill until decode may begin, besides the bytes."""
    gateway_seconds: float = 0.002
    """From a request's arrival until it is routed."""
    return_seconds: float = 0.001
    """From a worker's token to the client."""
    report_seconds: float = 1.0
    """Between two load reports of a worker."""
    cores: tuple[int, ...] = ()
    """The core of each worker, where workers share cores and halve each other's speed; empty: each has its own."""
    models: tuple[str, ...] = ()
    """The model of each worker; empty: all have one, and requests name none."""

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1 or self.num_hosts < 1:
            raise ValueError("a fleet has at least one decode worker and one host")
        if self.cores and len(self.cores) != self.num_workers:
            raise ValueError(f"{len(self.cores)} cores are named for {self.num_workers} workers")
        if self.models and len(self.models) != self.num_workers:
            raise ValueError(f"{len(self.models)} models are named for {self.num_workers} workers")

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    def profile_of(self, number: int) -> WorkerProfile:
        return self.prefill if number < self.num_prefill else self.decode

    def model_of(self, number: int) -> str:
        """Return the model of a worker; "": the only one."""
        return self.models[number] if self.models else ""

    def host_of(self, number: int) -> int:
        """Return the host of a worker."""
        in_role = number if number < self.num_prefill else number - self.num_prefill
        return in_role % self.num_hosts


_BANDWIDTH = 3.35e12 * 0.75
_FLOPS = 989e12 * 0.5
_PARAMETERS = 8.03e9
_KV_BYTES = 2 * 32 * 8 * 128 * 2

H100_8B = WorkerProfile(
    step_ms=1000 * 2 * _PARAMETERS / _BANDWIDTH + 1.0,  # and a millisecond of launches and sampling
    answer_ms=0.01,
    context_ms=1000 * _KV_BYTES / _BANDWIDTH,
    prompt_ms=1000 * 2 * _PARAMETERS / _FLOPS,
    prompt_context_ms=1000 * 4 * 32 * 4096 / _FLOPS,
    kv_tokens=int((0.9 * 80e9 - 2 * _PARAMETERS - 2e9) / _KV_BYTES),
    bytes_per_token=_KV_BYTES,
)


def h100_fleet(num_prefill: int, num_decode: int, workers_per_host: int = 8) -> FleetProfile:
    """Return a fleet of H100s with Llama 3.1 8B, eight to a host with 512 GB of store and 400 Gbit/s."""
    num_hosts = max(1, -(-(num_prefill + num_decode) // workers_per_host))
    return FleetProfile(
        num_prefill,
        num_decode,
        H100_8B,
        H100_8B,
        num_hosts=num_hosts,
        store_tokens=int(512e9 / _KV_BYTES),
        store_bytes_per_second=20e9,
        local_bytes_per_second=100e9,
        link_bytes_per_second=40e9,
    )

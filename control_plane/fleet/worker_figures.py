"""The numbers of a worker's report that routing needs: read from the messages once, not for each request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tandem.v1 import types_pb2 as pb

_PROBE_BYTES = 1 << 20
_LEAST_RATED_BYTES = 256 << 10
"""A KV service takes rates of transfers of this length or more, and first of probes."""
_MAX_WINDOW_BYTES, _WINDOWS = 4 << 20, 4
"""As in kv_transfer_svc/pull_memory.py."""
_LEAST_RATE, _LEAST_SECONDS = 1.0, 1e-6
"""Of a link, in bytes per second, and of a worker's steps: quotients of less say nothing, or are infinite."""
_LEAST_SHARE = 0.1
"""Of a transfer's time that is its bytes': the latency is that of other transfers."""
_READS_AT_ONCE = 4
"""As in kv_transfer_svc/pull_memory.py, with an arena of 64 MiB or more."""
_SEND_BUFFER_BYTES = 4 << 20
"""Of a connection, at most, by Linux's default."""


class Link(NamedTuple):
    """What one KV service has measured of its fetches from another."""

    latency_ms: float
    bytes_per_second: float
    """Of transfers, at once or not, with a round trip for each `bytes_per_transfer`."""
    bytes_per_transfer: float = math.inf
    reads_at_once: int = 1
    """Windows of one prompt that are read at once."""

    @property
    def bytes_per_second_of_one(self) -> float:
        """Bytes per second of a single read: no more than a connection may have on its way in a round trip."""
        if self.reads_at_once == 1 or self.latency_ms <= 0:
            return self.bytes_per_second
        return min(self.bytes_per_second, 1000.0 * _SEND_BUFFER_BYTES / self.latency_ms)

    def ms_per_byte(self, window_bytes: float) -> float:
        """Return what a byte takes in transfers of `window_bytes`, each with a round trip."""
        whole = 1000.0 / self.bytes_per_second
        own = max(_LEAST_SHARE * whole, whole - self.latency_ms / self.bytes_per_transfer)
        return max(own, (own + self.latency_ms / window_bytes) / self.reads_at_once)


ASSUMED_LINK = Link(latency_ms=2.0, bytes_per_second=1e9)
"""Between two hosts before a transfer: until its first byte, and then."""


class Arena(NamedTuple):
    """The memory of a KV service for what it pulls from other hosts."""

    free_bytes: float
    window_bytes: float
    """Of one read: a quarter of the arena, at most 4 MiB."""


class WorkerFigures(msgspec.Struct, frozen=True, gc=False):
    """Of one worker as of its last report. None: not known yet."""

    host_id: str
    model_id: str
    kv_address: str
    numerics_class: str
    context_length: int
    max_running: int | None
    """Requests that the worker runs at once, as it says in its settings."""
    pool_tokens: int
    """Of its KV pool; 0 if the pool is not reported yet."""
    tokens_per_block: int
    bytes_per_block: int
    free_tokens: int
    """Free, or cached and in no request's use."""
    has_free_blocks: bool
    num_tokens_in_flight: int
    num_running: int
    num_waiting: int
    step_ms: float | None
    """The mean duration of a step over the worker's life."""
    num_prompt_tokens: float
    """Computed over the worker's life."""
    step_seconds: float
    """Of its steps over its life."""
    answer_rate: float | None
    """Tokens sampled per second of steps."""
    has_store: bool
    """Of a KV service: whether it has a block store."""
    links: Mapping[str, Link]
    """Of a KV service: to the KV services it has fetched from, by address."""
    arena: Arena | None
    """Of a KV service."""
    chunk_tokens: int | None
    """Prompt tokens that the worker computes in a step at most, as it says in its settings."""
    bytes_per_token: float
    """Of its KV pool; 0 if the pool is not reported yet."""


def figures_of(info: pb.WorkerInfo, load: pb.LoadReport) -> WorkerFigures:
    """Read a worker's description and report."""
    pool, counters, service = load.kv, load.counters, load.kv_service
    num_free, tokens_per_block = pool.num_free_blocks + pool.num_cached_blocks, pool.tokens_per_block
    seconds, num_steps = counters.get("step_seconds", 0.0), counters.get("steps", 0.0)
    return WorkerFigures(
        host_id=info.host_id,
        model_id=info.card.model_id,
        kv_address=info.kv_address,
        numerics_class=info.card.fingerprint.numerics_class,
        context_length=info.card.context_length,
        max_running=_number(info, "max_num_seqs"),
        pool_tokens=pool.num_total_blocks * tokens_per_block,
        tokens_per_block=tokens_per_block,
        bytes_per_block=pool.bytes_per_block,
        free_tokens=num_free * max(1, tokens_per_block),
        has_free_blocks=num_free > 0,
        num_tokens_in_flight=load.num_tokens_in_flight,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        step_ms=1000.0 * seconds / num_steps if num_steps > 0 and seconds > 0 else None,
        num_prompt_tokens=counters.get("prompt_tokens_computed", 0.0),
        step_seconds=seconds,
        answer_rate=_rate(counters.get("tokens_generated", 0.0), seconds),
        has_store=service.HasField("store"),
        links={each.address: _link(each) for each in service.links if each.bytes_per_second >= _LEAST_RATE},
        arena=_arena(service) if service.arena_bytes else None,
        chunk_tokens=_number(info, "max_num_batched_tokens"),
        bytes_per_token=pool.bytes_per_block / tokens_per_block if tokens_per_block else 0.0,
    )


def _number(info: pb.WorkerInfo, setting: str) -> int | None:
    text = info.settings.get(setting, "")
    return int(text) if text.isdecimal() and text.isascii() else None


def _link(link: pb.KvLink) -> Link:
    if link.bytes_per_run >= _LEAST_RATED_BYTES:
        return Link(link.latency_ms, link.bytes_per_second, link.bytes_per_run, _READS_AT_ONCE)
    mean = link.num_bytes / link.num_transfers if link.num_transfers else _PROBE_BYTES  # of release 0.2
    return Link(link.latency_ms, link.bytes_per_second, max(_LEAST_RATED_BYTES, mean))


def _arena(service: pb.KvServiceLoad) -> Arena:
    return Arena(service.arena_free_bytes, min(_MAX_WINDOW_BYTES, service.arena_bytes / _WINDOWS))


def _rate(number: float, seconds: float) -> float | None:
    return number / seconds if number > 0 and seconds >= _LEAST_SECONDS else None

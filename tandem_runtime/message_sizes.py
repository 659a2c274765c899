"""Bounds the size of gRPC messages, by service and direction.

gRPC reads a whole message into memory before any handler sees it. So the bound is what one caller can make a process
hold; the largest legal message must fit.

| service | direction | largest legal message | bound |
|---|---|---|---:|
| control plane | request | Register: model card, settings, load with 1,000 links: under 1 MB | 4 MiB |
| control plane | reply | ListWorkers: 1,000 workers of 10 to 20 kB | 64 MiB |
| worker | request | Submit: 3 bytes a token, 18 a block of 16: 4.1 MB for 1M tokens, 41 MB for 10M | 64 MiB |
| worker | reply | Tables: 4,096 rows a table; a step of 64 answers with log probabilities is under 4 MB | 32 MiB |
| encode worker | request | Encode: 2,048 inputs of 512 tokens, 4 bytes each: 4.2 MB | 16 MiB |
| encode worker | reply | Encode: 2,048 embeddings of 2,048 dimensions, 4 bytes each: 16.8 MB | 32 MiB |
| KV service | request | Renew: 10,000 handles of 300 bytes; a slab of 4,096 blocks is 0.3 MB | 16 MiB |
| KV service | reply | Tables: 4,096 rows a table; a chunk of KV has 1 MiB | 32 MiB |
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """The largest messages of a service, in bytes."""

    request_bytes: int
    reply_bytes: int


SERVICES: dict[str, Sizes] = {
    "tandem.v1.ControlPlaneService": Sizes(4 * _MIB, 64 * _MIB),
    "tandem.v1.WorkerService": Sizes(64 * _MIB, 32 * _MIB),
    "tandem.v1.EncodeService": Sizes(16 * _MIB, 32 * _MIB),
    "tandem.v1.KvTransferService": Sizes(16 * _MIB, 32 * _MIB),
}

LARGEST = Sizes(
    max(sizes.request_bytes for sizes in SERVICES.values()), max(sizes.reply_bytes for sizes in SERVICES.values())
)
"""For channels, which may lead to any service, and for servers of other services."""

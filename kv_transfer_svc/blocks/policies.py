"""Which eviction policies are there, and which one is meant when nobody says?

Measured on `mooncake_conversation.jsonl` (`python -m benchmarks.eviction`), token hit rate by size of the cache as a
share of the working set; the optimum knows the future:

    size    lru    s3_fifo   cost_aware   optimum
     2 %    7.8       10.3          8.1      31.3
     5 %   19.8       17.5         18.5      37.3
    10 %   28.2       25.1         27.7      37.3
    20 %   35.1       33.9         33.6      37.3

A block of a conversation is used once more, by the next turn, or never: how long ago says more than how often. Only a
cache far too small does better by not letting everybody in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kv_transfer_svc.blocks.cost_aware import CostAwarePolicy
from kv_transfer_svc.blocks.lru import LruPolicy
from kv_transfer_svc.blocks.quotas import NewPolicy
from kv_transfer_svc.blocks.s3_fifo import S3FifoPolicy

POLICIES: Final[Mapping[str, NewPolicy]] = {"lru": LruPolicy, "s3_fifo": S3FifoPolicy, "cost_aware": CostAwarePolicy}
DEFAULT_POLICY: Final[NewPolicy] = LruPolicy

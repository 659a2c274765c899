"""The disk tier: KV blocks in segment files. See disk_tier.py."""

from kv_transfer_svc.disk.disk_tier import DiskStats, DiskTier
from kv_transfer_svc.disk.segment_log import DiskCounters

__all__ = ["DiskCounters", "DiskStats", "DiskTier"]

"""How do KV blocks outlive their place in DRAM? See disk_tier.py."""

from kv_transfer_svc.disk.disk_tier import DiskTier
from kv_transfer_svc.disk.stats import DiskCounters, DiskFigures

__all__ = ["DiskCounters", "DiskFigures", "DiskTier"]

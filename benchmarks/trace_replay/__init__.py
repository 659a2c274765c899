"""Replays a trace through the real system: the share of prompt tokens found cached, beside an offline LRU."""

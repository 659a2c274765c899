"""Simulates eviction policies on a trace: the share of prompt tokens that would be cached."""

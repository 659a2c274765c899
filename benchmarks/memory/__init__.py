"""Measures an engine's memory beside weights and KV pool, and what two workers share."""

"""Measures the gateway: tokens per CPU second, idle and slow clients, memory over time."""

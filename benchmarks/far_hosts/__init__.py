"""Measures where prompts are read if prefill is far from decode."""

"""Measures what a refusal costs."""

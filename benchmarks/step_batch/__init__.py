"""Measures what a step with tokens costs a gateway, beside another checkout."""

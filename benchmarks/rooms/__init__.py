"""Measures what a full model does to the first tokens of another one."""

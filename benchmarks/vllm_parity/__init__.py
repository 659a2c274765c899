"""Compares tokens of Tandem with vLLM inside with those of vLLM alone."""

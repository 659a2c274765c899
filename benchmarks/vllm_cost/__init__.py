"""Measures what Tandem's adapter costs beside vLLM."""

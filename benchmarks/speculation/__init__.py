"""Measures the speed-up of speculative decoding, and its cost where drafts cannot help."""

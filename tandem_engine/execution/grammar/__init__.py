"""Computes which tokens a grammar allows next in an answer."""

"""Measures how long requests of each kind hold up a gateway of 1,000 workers."""

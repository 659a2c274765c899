"""A rolling upgrade to another numerics class and back, under streams."""

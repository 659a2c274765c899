"""Builds the wheels of Tandem: a pure one, and platform wheels with compiled kernels."""

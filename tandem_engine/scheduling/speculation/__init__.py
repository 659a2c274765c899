"""Proposes draft tokens for answers. A wrong draft costs a row of a step, and never changes a token."""

"""Explains requests: where the time went, why the workers were chosen, what moved, and the cost."""

"""Measures gaps between tokens beside long prompts: one core per kind of work, or two cores for both."""

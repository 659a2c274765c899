"""Checks that the time to first token does not reveal the prompts of other accounts."""

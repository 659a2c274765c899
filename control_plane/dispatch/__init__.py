"""Starts a request on its workers, merges their tokens and recovers from lost workers."""

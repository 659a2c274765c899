"""Percentiles of the time to the first token: a client's own, and those of a scrape."""

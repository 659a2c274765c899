"""Compares two checkouts: runs one benchmark on each by turns, and judges the ratio of medians."""

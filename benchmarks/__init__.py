"""Measurements of the whole system; see README.md beside this file."""

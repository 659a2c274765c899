"""Compares ways to give engines their cores."""

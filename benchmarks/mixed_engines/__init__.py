"""Measures a fleet of two engines under one model name."""

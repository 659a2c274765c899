"""Measures the share of a decode step that grammar masks take."""

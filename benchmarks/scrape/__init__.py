"""Measures what a scrape of a gateway costs its event loop."""

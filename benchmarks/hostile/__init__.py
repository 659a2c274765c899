"""Measures what hostile requests, long prompts and bad connections of one client do to the streams of others."""

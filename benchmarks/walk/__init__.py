"""Counts the files and lines that one streamed chat request crosses, and the size of the code."""

"""The live page at `/`, its files, and the stream that keeps it current."""

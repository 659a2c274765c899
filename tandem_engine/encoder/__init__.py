"""Embeddings, classes and rankings: encoders, and decoders that serve as encoders."""

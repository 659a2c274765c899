"""Tracks the workers, the models they serve and the streams to them."""

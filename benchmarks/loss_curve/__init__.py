"""Plots the loss of the built-in model's training."""

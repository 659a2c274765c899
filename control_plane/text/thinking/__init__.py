"""Separates the thinking of an answer from the answer, in the form that the model's chat template writes it."""

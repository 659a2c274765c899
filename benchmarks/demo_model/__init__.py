"""Grades the built-in model's answers to held-out questions, sent through a running gateway."""

"""The built-in model's training text, written by programs, and the graded questions kept out of it."""

from demo_model.corpus.held_out import GradedItem, held_out
from demo_model.corpus.mixture import document, documents
from demo_model.corpus.sample import Document, Message, Sample

__all__ = ["Document", "GradedItem", "Message", "Sample", "document", "documents", "held_out"]

"""The built-in model's training text, written by programs, and the graded questions kept out of it."""

from engine.demo.corpus.held_out import GradedItem, held_out
from engine.demo.corpus.mixture import document, documents
from engine.demo.corpus.sample import Document, Message, Sample

__all__ = ["Document", "GradedItem", "Message", "Sample", "document", "documents", "held_out"]

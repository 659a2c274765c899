"""Turns text into token ids, and token ids into text: templates, tokenizers, stop strings, tools and grammars."""

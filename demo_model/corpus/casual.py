"""Imitates how people type: now and then without the capital at the start or the mark at the end."""

from random import Random

_NO_CAPITAL_SHARE = 0.15
_NO_MARK_SHARE = 0.12


def casual(random: Random, text: str) -> str:
    """Return the text as somebody in a hurry might type it; most of the time unchanged."""
    if random.random() < _NO_CAPITAL_SHARE and not text.startswith(("I ", "I'")):
        text = text[:1].lower() + text[1:]
    if random.random() < _NO_MARK_SHARE and text.endswith((".", "?")):
        text = text[:-1].rstrip()
    return text

"""Hands a prompt of 131,072 tokens over in five ways, beside four streams."""

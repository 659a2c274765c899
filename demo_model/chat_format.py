"""Encodes documents as token ids, and marks the ids that the model is trained to predict.

The text equals what `chat_template.jinja` renders (tested). Control tokens are placed by id, so no text of a message
can become a control token.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from demo_model.corpus.sample import Document, Message, Tool
from demo_model.drills import drill
from demo_model.encoded import MESSAGE_END, MESSAGE_START, SPECIAL_TOKEN_IDS, SPECIAL_TOKENS, Encoded

CHAT_TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"
_TOOLS_CLOSING = "To use one, answer with <tool_call> and </tool_call> around its name and arguments as JSON."


def _system_text(system: str, tools: tuple[Tool, ...]) -> str:
    if not tools:
        return system
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return f"{system}\n\nTools:\n{lines}{_TOOLS_CLOSING}" if system else f"Tools:\n{lines}{_TOOLS_CLOSING}"


def _rendered_messages(document: Document) -> Iterator[Message]:
    """Yield the messages with the tools written into the system message, as the template does."""
    messages = document.messages
    has_system = bool(messages) and messages[0].role == "system"
    if has_system or document.tools:
        yield Message("system", _system_text(messages[0].content if has_system else "", document.tools))
    yield from messages[1:] if has_system else messages


class ChatEncoder:
    """Encodes documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = tuple(tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
        assert ids == SPECIAL_TOKEN_IDS, f"special tokens have ids {ids}, expected {SPECIAL_TOKEN_IDS}"
        self._end_of_text, self._message_start, self._message_end = SPECIAL_TOKEN_IDS

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, document: Document) -> Encoded:
        """Encode a document and the separator after it.

        All of a plain text is trained; of a chat, the assistant's replies and the token that ends each reply.
        """
        encoded = Encoded([], [])
        if document.text:
            self._append(encoded, [*self._encode(document.text), self._end_of_text], True)
            return encoded
        for message in _rendered_messages(document):
            self._append_message(encoded, message)
        self._append(encoded, [self._end_of_text], False)
        return encoded

    def drill(self, random: Random) -> Encoded:
        """Make a drill in copying with this vocabulary."""
        return drill(random, self._tokenizer.get_vocab_size(), self._encode)

    def _append_message(self, encoded: Encoded, message: Message) -> None:
        is_reply = message.role == "assistant"
        self._append(encoded, [self._message_start, *self._encode(f"{message.role}\n")], False)
        self._append(encoded, [*self._encode(message.content), self._message_end], is_reply)
        self._append(encoded, self._encode("\n"), False)

    @staticmethod
    def _append(encoded: Encoded, token_ids: list[int], is_trained: bool) -> None:
        encoded.token_ids.extend(token_ids)
        encoded.is_trained.extend([is_trained] * len(token_ids))


def rendered_text(document: Document) -> str:
    """Return the text of a document as the template renders it; the tokenizer is trained on these texts."""
    if document.text:
        return document.text
    return "".join(
        f"{MESSAGE_START}{message.role}\n{message.content}{MESSAGE_END}\n" for message in _rendered_messages(document)
    )

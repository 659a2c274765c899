"""How do prompts and chats become token ids, such that no user can write a control token?

Text from users is ordinary text, whatever it looks like: `<|im_end|>` in a message is six or so everyday tokens. Where
a user's text contains the name of a control token it is marked before the template is rendered, and encoded with
control tokens switched off; all other text is encoded in one piece, exactly as `transformers` would.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from tokenizers import Tokenizer

from control_plane.text.detokenizer import ByteLevelDetokenizer, Detokenizer, NamingDetokenizer, WindowDetokenizer
from control_plane.text.template import ChatTemplate, Messages
from control_plane.text.token_bytes import TokenBytes
from tandem_runtime.errors import InvalidRequest

T = TypeVar("T")

_INLINE_CHARACTERS = 4096
"""Longer texts are encoded in a thread; shorter ones take less time than the way there (about 0.1 ms)."""

_PRIVATE_USE = range(0x10F000, 0x10FFFD)


class TextTokenizer:
    """A `tokenizer.json` at work; safe to use from several threads."""

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any]) -> None:
        """Load the tokenizer; takes up to a second for large vocabularies, so not on an event loop.

        `config` is tokenizer_config.json or a part of it: the special tokens by name.
        """
        self._json = tokenizer_json.decode()
        self._tokenizer = _load(self._json)
        self.special_tokens = _special_tokens(config)
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self.control_ids.values())
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._control_pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control = re.compile(self._control_pattern)
        self._bytes = TokenBytes(self._tokenizer)

    async def prompt_ids(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Encode a prompt as the tokenizer does by itself, with its special tokens around it.

        With `control_tokens` their names in the text become control tokens: the caller writes the model's format.
        """
        return await _off_the_loop_if_long(len(text), lambda: self.encode_prompt(text, control_tokens=control_tokens))

    async def chat_ids(self, template: ChatTemplate, messages: Messages, tools: Messages = ()) -> list[int]:
        """Render and encode a chat; nothing is added to what the template writes."""
        length = sum(map(len, _strings((messages, tools))))
        return await _off_the_loop_if_long(length, lambda: self.encode_chat(template, messages, tools))

    def encode_prompt(self, text: str, *, control_tokens: bool = False) -> list[int]:
        _require_unicode(text, "prompt")
        as_text = not control_tokens and self._control.search(text)
        tokenizer = self._without_control_tokens if as_text else self._tokenizer
        return list(tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, template: ChatTemplate, messages: Messages, tools: Messages = ()) -> list[int]:
        for field, said in (("messages", messages), ("tools", tools)):
            for text in _strings(said):
                _require_unicode(text, field)
        strings = list(_strings((messages, tools)))
        if not any(self._control.search(text) for text in strings):
            return self._encode(template.render(messages, tools=tools or None))
        start, end = _unused_characters("".join(strings) + template.source)
        mark: Callable[[str], str] = lambda text: self._control.sub(f"{start}\\g<0>{end}", text)  # noqa: E731
        marked, marked_tools = _map_strings(messages, mark), _map_strings(tools, mark)
        return self._encode_marked(template.render(marked, tools=marked_tools or None), start, end)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, context_ids: Sequence[int] = (), shown: Collection[int] = ()) -> Detokenizer:
        """Return a fresh incremental detokenizer for what follows `context_ids`.

        `shown` are control tokens whose names are part of the text.
        """
        if shown:
            names = {token_id: name for name, token_id in self.control_ids.items() if token_id in shown}
            return NamingDetokenizer(self.detokenizer, names, context_ids)
        if self._bytes.is_byte_level:
            return ByteLevelDetokenizer(self._visible_bytes)
        return WindowDetokenizer(self.decode, context_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special tokens by their name: what logprobs show."""
        return self._bytes[token_id]

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._bytes[token_id]

    @cached_property
    def _without_control_tokens(self) -> Tokenizer:
        tokenizer = _load(self._json)
        tokenizer.encode_special_tokens = True  # sic: the names are encoded like any other text
        return tokenizer

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_marked(self, text: str, start: str, end: str) -> list[int]:
        """Encode a rendered chat; control tokens between markers are text, and markers a template tore apart vanish."""
        parts = re.split(f"{start}({self._control_pattern}){end}|[{start}{end}]", text)
        token_ids = self._encode(parts[0])
        for users, written in zip(parts[1::2], parts[2::2], strict=True):
            token_ids += self._text_ids(users) if users else []
            token_ids += _encode_inside(self._tokenizer, written)
        return token_ids

    def _text_ids(self, text: str) -> list[int]:
        token_ids = _encode_inside(self._without_control_tokens, text)
        if self._special_ids.intersection(token_ids):
            raise InvalidRequest(f"the text {text!r} in a message is a control token of this model; take it out")
        return token_ids


def _encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text that goes on after other text: without the space that some tokenizers put before a first word."""
    if not text:
        return []
    before = tokenizer.encode("\n", add_special_tokens=False).ids
    token_ids = list(tokenizer.encode("\n" + text, add_special_tokens=False).ids)
    if token_ids[: len(before)] == before:
        return token_ids[len(before) :]
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _require_unicode(text: str, field: str) -> None:
    """Raise InvalidRequest if `text` has half a surrogate pair, which JSON can say and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} has U+{ord(text[error.start]):04X} at character {error.start}, half of a surrogate pair; "
            "send the whole character, or leave it out",
            field=field,
        ) from error


def _load(tokenizer_json: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()  # settings of somebody's training run, saved along
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like, which stand in the config as text or as an object with `content`."""
    contents = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in config.items()}
    return {name: text for name, text in contents.items() if name.endswith("_token") and isinstance(text, str)}


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value


def _unused_characters(text: str) -> tuple[str, str]:
    """Return two private-use characters that do not occur in `text`."""
    used = set(text)
    unused = (chr(point) for point in _PRIVATE_USE if chr(point) not in used)
    return next(unused), next(unused)


async def _off_the_loop_if_long(num_characters: int, encode: Callable[[], T]) -> T:
    return encode() if num_characters <= _INLINE_CHARACTERS else await asyncio.to_thread(encode)

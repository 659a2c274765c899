"""Encodes prompts and chats as token ids, in a way that no user can write a control token.

Text from users is ordinary text: `<|im_end|>` in a message becomes about six ordinary tokens. If a user's text has the
name of a control token, the name is marked before the template is rendered, and encoded with control tokens switched
off. All other text is encoded in one piece, exactly as `transformers` does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from tokenizers import Tokenizer

from control_plane.generation import ModelDescription
from control_plane.text.detokenizer import ByteLevelDetokenizer, Detokenizer, NamingDetokenizer, WindowDetokenizer
from control_plane.text.template import ChatTemplate, Messages
from tandem_runtime.errors import InternalError, InvalidRequest

T = TypeVar("T")

_INLINE_CHARACTERS = 4096
"""Longer texts are encoded in a thread. For shorter texts, the switch to a thread (about 0.1 ms) would take longer."""

_MAX_TOKENIZERS = 16
_PRIVATE_USE = range(0x10F000, 0x10FFFD)


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + position): byte for position, byte in enumerate(_OTHERS)
}
"""Byte-level BPE writes each byte as one visible character (Radford et al., 2019, GPT-2)."""


class TextTokenizer:
    """A loaded `tokenizer.json`; safe to use from several threads."""

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any]) -> None:
        """Load the tokenizer. This takes up to a second for large vocabularies: do not call it on an event loop.

        `config` is tokenizer_config.json, or the part of it that has the special tokens by name.
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
        """Encode a prompt, with the special tokens that the tokenizer itself adds.

        With `control_tokens`, names of control tokens in the text become control tokens.
        """
        return await _off_the_loop_if_long(len(text), lambda: self.encode_prompt(text, control_tokens=control_tokens))

    async def chat_ids(self, template: ChatTemplate, messages: Messages, tools: Messages = ()) -> list[int]:
        """Render and encode a chat. No token is added to the template's output."""
        length = sum(map(len, _strings((messages, tools))))
        return await _off_the_loop_if_long(length, lambda: self.encode_chat(template, messages, tools))

    def encode_prompt(self, text: str, *, control_tokens: bool = False) -> list[int]:
        _require_unicode(text, "prompt")
        as_text = not control_tokens and self._control.search(text)
        tokenizer = self._without_control_tokens if as_text else self._tokenizer
        return list(tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, template: ChatTemplate, messages: Messages, tools: Messages = ()) -> list[int]:
        for field, value in (("messages", messages), ("tools", tools)):
            for text in _strings(value):
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
        """Return a new detokenizer for the tokens after `context_ids`.

        `shown` are control tokens whose names become part of the text.
        """
        if shown:
            names = {token_id: name for name, token_id in self.control_ids.items() if token_id in shown}
            return NamingDetokenizer(self.detokenizer, names, context_ids)
        if self._bytes.is_byte_level:
            return ByteLevelDetokenizer(self._visible_bytes)
        return WindowDetokenizer(self.decode, context_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or the name of a special token, as logprobs show them."""
        return self._bytes[token_id]

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._bytes[token_id]

    @cached_property
    def _without_control_tokens(self) -> Tokenizer:
        tokenizer = _load(self._json)
        tokenizer.encode_special_tokens = True  # sic: encodes the names like any other text
        return tokenizer

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_marked(self, text: str, start: str, end: str) -> list[int]:
        """Encode a rendered chat. Names between markers are text; single markers, left by a template, are removed."""
        parts = re.split(f"{start}({self._control_pattern}){end}|[{start}{end}]", text)
        token_ids = self._encode(parts[0])
        for user_text, template_text in zip(parts[1::2], parts[2::2], strict=True):
            token_ids += self._text_ids(user_text) if user_text else []
            token_ids += _encode_inside(self._tokenizer, template_text)
        return token_ids

    def _text_ids(self, text: str) -> list[int]:
        token_ids = _encode_inside(self._without_control_tokens, text)
        if self._special_ids.intersection(token_ids):
            raise InvalidRequest(f"the text {text!r} in a message is a control token of this model; remove it")
        return token_ids


def _encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode text that follows other text, without the space that some tokenizers add before a first word."""
    if not text:
        return []
    before = tokenizer.encode("\n", add_special_tokens=False).ids
    token_ids = list(tokenizer.encode("\n" + text, add_special_tokens=False).ids)
    if token_ids[: len(before)] == before:
        return token_ids[len(before) :]
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _require_unicode(text: str, field: str) -> None:
    """Raise InvalidRequest if `text` has half a surrogate pair: JSON allows it, no tokenizer can encode it."""
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
    tokenizer.no_truncation()  # tokenizer.json may have settings of a training run
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and others; the config has each as a text or as an object with `content`."""
    contents = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in config.items()}
    return {name: text for name, text in contents.items() if name.endswith("_token") and isinstance(text, str)}


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys included."""
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


class TokenBytes:
    """The bytes of tokens, as the tokenizer's own decoder joins them. Caches the tokens that were requested."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)
        self._known: dict[int, bytes] = {}

    @property
    def is_byte_level(self) -> bool:
        """Whether the decoding of a text is the concatenation of its tokens' bytes."""
        return self._kinds == ["ByteLevel"]

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._of(self._tokenizer.id_to_token(token_id))
        return self._known[token_id]

    def _of(self, token: str | None) -> bytes:
        if token is None:  # embeddings are often padded beyond the vocabulary
            return b""
        if "ByteLevel" in self._kinds:
            bytes_ = [_BYTE_OF_CHARACTER.get(character) for character in token]
            known = [byte for byte in bytes_ if byte is not None]
            return bytes(known) if len(known) == len(bytes_) else token.encode()
        if "ByteFallback" in self._kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """Return the type names of the tokenizer's decoders, in order."""
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


class TokenizerCache:
    """Loaded tokenizers by model fingerprint. Requests that arrive while one loads wait for the same load."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[str, asyncio.Future[TextTokenizer]] = OrderedDict()

    async def get(self, model: ModelDescription) -> TextTokenizer:
        """Return the model's tokenizer. Raise InternalError if its files are invalid."""
        loading = self._tokenizers.get(model.fingerprint)
        if loading is None:
            loading = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, model))
            self._keep(model.fingerprint, loading)
        self._tokenizers.move_to_end(model.fingerprint)
        try:
            return await asyncio.shield(loading)  # a cancelled caller must not cancel the load for others
        except InternalError:
            self._tokenizers.pop(model.fingerprint, None)
            raise

    def _keep(self, fingerprint: str, loading: asyncio.Future[TextTokenizer]) -> None:
        self._tokenizers[fingerprint] = loading
        while len(self._tokenizers) > _MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)


def _load_tokenizer(model: ModelDescription) -> TextTokenizer:
    try:
        return TextTokenizer(model.tokenizer_json, model.tokenizer_config)
    except Exception as error:  # the library raises bare Exception
        raise InternalError(f"the tokenizer.json of {model.model_id} cannot be read: {error}") from error

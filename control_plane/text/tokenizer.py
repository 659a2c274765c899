"""Encodes prompts and chats as token ids, in a way that no user can write a control token.

Text from users is ordinary text: `<|im_end|>` in a message becomes about six ordinary tokens. If a user's text has the
name of a control token, the name is marked before the template is rendered, and encoded with control tokens switched
off. All other text is encoded exactly as `transformers` does, long texts in pieces.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tokenizers import Encoding, Tokenizer

from control_plane.generation import EncoderInput, ModelDescription, TokenIds
from control_plane.text.detokenizer import Detokenizer
from control_plane.text.pieces import PieceEncoder
from control_plane.text.template import ChatTemplate, Messages
from control_plane.text.vocabulary import Vocabulary, VocabularyData, vocabulary_of
from tandem_runtime.errors import InternalError, InvalidRequest

_MAX_TOKENIZERS = 16
_PRIVATE_USE = range(0x10F000, 0x10FFFD)
_GROWING_NORMALIZERS = ("Prepend", "NFC", "NFD")
"""Normalizers after which a text has at least a quarter of its bytes. NFC composes: 3 bytes become 2."""
_MOST_SHRINKING = 4
_SHORT_CHARACTERS = 64
_MAX_SHORT = 4096
"""Short texts between names whose tokens are remembered while a chat is encoded."""


class TextTokenizer:
    """A loaded `tokenizer.json`. Everything here computes: call it in a text process, not on an event loop."""

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any]) -> None:
        """Load the tokenizer. This takes up to a second and more for large vocabularies.

        `config` is tokenizer_config.json, or the part of it that has the special tokens by name.
        """
        self._json = tokenizer_json.decode()
        self._tokenizer = _load(self._json)
        self._encoder = PieceEncoder(self._tokenizer)
        self.special_tokens = _special_tokens(config)
        self.vocabulary_data: VocabularyData = vocabulary_of(self._tokenizer)
        self.control_ids = self.vocabulary_data.control_ids
        self._special_ids = frozenset(self.control_ids.values())
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._control_pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control = re.compile(self._control_pattern)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """The most bytes of a text that one token can stand for; None if there is no bound."""
        return _max_token_bytes(json.loads(self._json), self.vocabulary_data)

    @cached_property
    def grammar_ids(self) -> dict[str, int]:
        """The tokens that no text of a grammar can be: special tokens, and added ones that are written `<...>`.

        llguidance decides so. Qwen's `<tool_call>` is such a token, although it is not special.
        """
        return {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.vocabulary_data)

    def encode_prompt(self, text: str, *, control_tokens: bool = False, add_special_tokens: bool = True) -> TokenIds:
        _require_unicode(text, "prompt")
        as_text = not control_tokens and self._control.search(text)
        encoder = self._without_control_tokens if as_text else self._encoder
        return encoder.ids(text, add_special_tokens=add_special_tokens)

    def encode_texts(
        self, first: str, second: str | None = None, *, max_tokens: int | None = None, field: str = "input"
    ) -> EncoderInput:
        """Encode a text, or a pair of texts, for an encoder, with the special tokens that its tokenizer adds.

        `max_tokens`: cut the text so that it fits, special tokens included; of a pair the longer text first. Names of
        control tokens in the texts are ordinary text. Raise InvalidRequest if the special tokens leave no room.
        """
        for text in (first, second or ""):
            _require_unicode(text, field)
        tokenizer = self._of_encoders
        num_special = tokenizer.num_special_tokens_to_add(second is not None)
        if max_tokens is not None and max_tokens <= num_special:  # it would cut nothing then
            raise InvalidRequest(
                f"{field} cannot be cut to {max_tokens:,} tokens: {num_special} of them are special ones; allow more",
                field=field,
            )
        tokenizer.encode_special_tokens = any(self._control.search(text) for text in (first, second or ""))
        if max_tokens is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(max_tokens, strategy="longest_first")
        encoding = tokenizer.encode(first, second)
        ids = TokenIds(encoding.ids).packed()
        return EncoderInput(ids, 0 if second is None else _num_first_tokens(encoding))

    @cached_property
    def _of_encoders(self) -> Tokenizer:
        return _load(self._json)

    def encode_chat(
        self,
        template: ChatTemplate,
        messages: Messages,
        tools: Messages = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        check_text: Callable[[str], None] = lambda text: None,
    ) -> TokenIds:
        """Render and encode a chat. No token is added to the template's output.

        `variables` are the template's own. `check_text` gets the rendered chat, and may refuse it before it is encoded.
        """
        strings = []
        for field, value in (("messages", messages), ("tools", tools), ("chat_template_kwargs", variables)):
            for text in _strings(value):
                _require_unicode(text, field)
                strings.append(text)
        if not any(self._control.search(text) for text in strings):
            rendered = template.render(messages, tools=tools or None, variables=variables)
            check_text(rendered)
            return self._encoder.ids(rendered)
        start, end = _unused_characters([*strings, template.source])
        mark: Callable[[str], str] = lambda text: self._control.sub(f"{start}\\g<0>{end}", text)  # noqa: E731
        marked, marked_tools, marked_variables = (_map_strings(each, mark) for each in (messages, tools, variables))
        rendered = template.render(marked, tools=marked_tools or None, variables=marked_variables)
        check_text(rendered)
        return self._encode_marked(rendered, start, end)

    def mark_ids(self, mark: str) -> list[int]:
        """Return the ids of a mark that the model writes; one id if the mark is a token of its own."""
        return list(self._tokenizer.encode(mark, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, context_ids: Sequence[int] = (), shown: Collection[int] = ()) -> Detokenizer:
        """Return a new detokenizer for the tokens after `context_ids`.

        `shown` are control tokens whose names become part of the text.
        """
        return self.vocabulary.detokenizer(context_ids, shown)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, or the name of a special token, as logprobs show them."""
        return self.vocabulary.token_bytes(token_id)

    @cached_property
    def _without_control_tokens(self) -> PieceEncoder:
        tokenizer = _load(self._json)
        tokenizer.encode_special_tokens = True  # sic: encodes the names like any other text
        return PieceEncoder(tokenizer)

    def _encode_marked(self, text: str, start: str, end: str) -> TokenIds:
        """Encode a rendered chat. Names between markers are text; single markers, left by a template, are removed."""
        parts = re.split(f"{start}({self._control_pattern}){end}|[{start}{end}]", text)
        token_ids = array("I", self._encoder.ids(parts[0]))
        names: dict[str, TokenIds] = {}
        short: dict[str, TokenIds] = {}  # a chat that is all names has the same short texts between them
        for name, behind in zip(parts[1::2], parts[2::2], strict=True):
            if name:
                if name not in names:
                    names[name] = self._text_ids(name)
                token_ids.extend(names[name])
            ids = short.get(behind)
            if ids is None:
                ids = _encode_inside(self._encoder, behind)
                if len(behind) <= _SHORT_CHARACTERS and len(short) < _MAX_SHORT:
                    short[behind] = ids
            token_ids.extend(ids)
        return TokenIds(token_ids)

    def _text_ids(self, text: str) -> TokenIds:
        token_ids = _encode_inside(self._without_control_tokens, text)
        if self._special_ids.intersection(token_ids):
            raise InvalidRequest(f"the text {text!r} in a message is a control token of this model; remove it")
        return token_ids


def _num_first_tokens(encoding: Encoding) -> int:
    """Return how many tokens of an encoded pair belong to the first text, its special tokens included.

    A post-processor tells by type ids; one without types puts two separators between the texts, as RoBERTa's does.
    """
    types = encoding.type_ids
    if 1 in types:
        return int(types.index(1))
    texts = encoding.sequence_ids
    return int(texts.index(1)) if 1 in texts else len(types)


def _encode_inside(encoder: PieceEncoder, text: str) -> TokenIds:
    """Encode text that follows other text, without the space that some tokenizers add before a first word."""
    if not text:
        return TokenIds()
    before = encoder.ids("\n")
    token_ids = encoder.ids("\n" + text)
    if token_ids[: len(before)] == before:
        return token_ids[len(before) :]
    return encoder.ids(text)


def _max_token_bytes(tokenizer_json: Mapping[str, Any], vocabulary: VocabularyData) -> int | None:
    """Return the bytes of the longest token, if every byte of a text is in a token.

    That is so where unknown characters become bytes, and no part drops characters.
    """
    decoder, model = json.loads(vocabulary.decoder or "{}"), tokenizer_json.get("model") or {}
    has_bytes = model.get("byte_fallback") or "ByteLevel" in [part["type"] for part in _parts(decoder, "decoders")]
    normalizers = _parts(tokenizer_json.get("normalizer") or {}, "normalizers")
    strips = any(each.get("lstrip") or each.get("rstrip") for each in tokenizer_json.get("added_tokens") or ())
    splits = _parts(tokenizer_json.get("pre_tokenizer") or {}, "pretokenizers")
    if not has_bytes or strips or any(map(_drops, splits)) or not all(map(_grows, normalizers)):
        return None
    ends = memoryview(vocabulary.ends).cast("I")
    starts = (0, *ends[:-1])
    longest = max((end - start for start, end in zip(starts, ends, strict=True)), default=0)
    return longest * (_MOST_SHRINKING if normalizers else 1)


def _parts(part: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the parts of a sequence of decoders or normalizers; one that is no sequence is its only part."""
    return list(part.get(name) or ([part] if part.get("type") not in (None, "Sequence") else []))


def _drops(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the pre-tokenizer may drop characters between words."""
    keeps = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts")
    return pre_tokenizer.get("type") not in keeps or pre_tokenizer.get("behavior") == "Removed"


def _grows(normalizer: Mapping[str, Any]) -> bool:
    """Return whether the normalizer drops nothing, or no more than NFC does."""
    if normalizer.get("type") == "Replace":
        return normalizer.get("pattern") == {"String": " "} and bool(normalizer.get("content"))
    return normalizer.get("type") in _GROWING_NORMALIZERS


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


def _strings(value: Any) -> list[str]:
    """Return every string in a JSON value, keys included; no recursion, so that depth costs nothing."""
    found: list[str] = []
    waiting = [value]
    for each in waiting:  # grows meanwhile
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, Mapping):
            found += map(str, each)
            waiting += each.values()
        elif isinstance(each, Sequence):
            waiting += each
    return found


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Return two private-use characters that do not occur in these texts."""
    used = set[str]().union(*texts)
    unused = (chr(point) for point in _PRIVATE_USE if chr(point) not in used)
    return next(unused), next(unused)


class TokenizerCache:
    """Loaded tokenizers by model identity. Requests that arrive while one loads wait for the same load."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[str, asyncio.Future[TextTokenizer]] = OrderedDict()

    async def get(self, model: ModelDescription) -> TextTokenizer:
        """Return the model's tokenizer. Raise InternalError if its files are invalid."""
        loading = self._tokenizers.get(model.identity)
        if loading is None:
            loading = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, model))
            self._keep(model.identity, loading)
        self._tokenizers.move_to_end(model.identity)
        try:
            return await asyncio.shield(loading)  # a cancelled caller must not cancel the load for others
        except InternalError:
            self._tokenizers.pop(model.identity, None)
            raise

    def _keep(self, identity: str, loading: asyncio.Future[TextTokenizer]) -> None:
        self._tokenizers[identity] = loading
        while len(self._tokenizers) > _MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)


def _load_tokenizer(model: ModelDescription) -> TextTokenizer:
    return load_tokenizer(model.model_id, model.tokenizer_json, model.tokenizer_config)


def load_tokenizer(model_id: str, tokenizer_json: bytes, config: Mapping[str, Any]) -> TextTokenizer:
    """Return the tokenizer of a model. Raise InternalError if its files are invalid."""
    try:
        return TextTokenizer(tokenizer_json, config)
    except Exception as error:  # the library raises bare Exception
        raise InternalError(f"the tokenizer.json of {model_id} cannot be read: {error}") from error

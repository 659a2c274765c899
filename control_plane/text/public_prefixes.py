"""Finds the public texts that all accounts may share in the prompt caches.

The operator puts these texts, mostly system prompts, into a folder as *.txt files. A prompt shares a text's cache if
its token ids begin with the text's token ids. So each text is tokenized as the start of a chat (up to the first token
that depends on the user's message) and as the start of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from control_plane.generation import ModelDescription, ModelFacts
from control_plane.text.template import ChatTemplate
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InvalidRequest, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

TokenIds = tuple[int, ...]

_VALID_SECONDS = 3600.0
"""Token ids are made again after this time, because some templates write today's date."""
_MAX_MODELS = 256


class PublicPrefixes:
    """Public texts, and their token ids per model. Everything but `read` and `texts` computes."""

    def __init__(self, texts: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        """`texts` has each text by its file name, which log events use."""
        self._texts = dict(texts)
        self._clock = clock
        self._made: dict[tuple[str, str], tuple[float, list[TokenIds]]] = {}

    @classmethod
    def read(cls, folder: Path | None) -> PublicPrefixes | None:
        """Read a folder's texts; None without a folder. Raise InvalidRequest if folder or text cannot be read."""
        if folder is None:
            return None
        if not folder.is_dir():
            raise InvalidRequest(f"--public-prefixes {folder} is not a folder; create it, with one .txt file per text")
        texts = {path.name: _read(path) for path in sorted(folder.glob("*.txt"))}
        log.info("public_prefixes_read", folder=str(folder), names=list(texts))
        return cls({name: text for name, text in texts.items() if text})

    @property
    def texts(self) -> Mapping[str, str]:
        return self._texts

    def num_tokens(
        self, model: ModelDescription | ModelFacts, tokenizer: TextTokenizer, token_ids: Sequence[int]
    ) -> int:
        """Return how many leading tokens of a prompt are the start of a public text."""
        prefixes = self._prefixes(model, tokenizer)
        return max((_num_common(prefix, token_ids) for prefix in prefixes), default=0)

    def _prefixes(self, model: ModelDescription | ModelFacts, tokenizer: TextTokenizer) -> list[TokenIds]:
        key, now = (model.identity, model.chat_template), self._clock()
        made_at, prefixes = self._made.get(key, (0.0, None))
        if prefixes is None or now - made_at > _VALID_SECONDS:
            prefixes = [ids for name in self._texts for ids in self._make(name, model, tokenizer)]
            self._made.pop(key, None)
            self._made[key] = now, prefixes
            while len(self._made) > _MAX_MODELS:
                del self._made[next(iter(self._made))]
        return prefixes

    def _make(self, name: str, model: ModelDescription | ModelFacts, tokenizer: TextTokenizer) -> list[TokenIds]:
        """Return a text's token ids at the start of a chat, of a prompt, and of a prompt in the model's own format."""
        text = self._texts[name]
        made = [tuple(tokenizer.encode_prompt(text, control_tokens=is_raw)) for is_raw in (False, True)]
        if model.chat_template:
            try:
                made.append(_chat_ids(text, model.chat_template, tokenizer))
            except TandemError as error:
                log.warning("public_prefix_without_chat", name=name, model=model.model_id, error=error.message)
        return list(dict.fromkeys(made))


def _chat_ids(text: str, chat_template: str, tokenizer: TextTokenizer) -> TokenIds:
    """Return the token ids with which every chat with this system message begins."""
    template = ChatTemplate(chat_template, tokenizer.special_tokens)
    chats = [
        tokenizer.encode_chat(template, [{"role": "system", "content": text}, {"role": "user", "content": message}])
        for message in ("0", "x")
    ]
    return tuple(chats[0][: _num_common(*chats)])


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def _read(path: Path) -> str:
    """Return a file's text without the line break at its end."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the public prefix {path} cannot be read: {error}; save it as a UTF-8 text") from error

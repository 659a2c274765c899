"""Who loads a model's tokenizer, once, and off the event loop?"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from control_plane.generation import ModelDescription
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InternalError

_MAX_TOKENIZERS = 16


class TokenizerCache:
    """Tokenizers by model fingerprint; requests that come while one loads wait for the same loading."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[str, asyncio.Future[TextTokenizer]] = OrderedDict()

    async def get(self, model: ModelDescription) -> TextTokenizer:
        """Return the model's tokenizer; raises InternalError if its files are broken."""
        loading = self._tokenizers.get(model.fingerprint)
        if loading is None:
            loading = asyncio.ensure_future(asyncio.to_thread(_load, model))
            self._keep(model.fingerprint, loading)
        self._tokenizers.move_to_end(model.fingerprint)
        try:
            return await asyncio.shield(loading)  # the first caller may leave, the others still wait
        except InternalError:
            self._tokenizers.pop(model.fingerprint, None)
            raise

    def _keep(self, fingerprint: str, loading: asyncio.Future[TextTokenizer]) -> None:
        self._tokenizers[fingerprint] = loading
        while len(self._tokenizers) > _MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)


def _load(model: ModelDescription) -> TextTokenizer:
    try:
        return TextTokenizer(model.tokenizer_json, model.tokenizer_config)
    except Exception as error:  # the library raises bare Exception
        raise InternalError(f"the tokenizer.json of {model.model_id} cannot be read: {error}") from error

"""Describes the models that the registered workers serve, for the text pipeline and the API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from control_plane.fleet.registry import RESTART_SECONDS, Worker, WorkerRegistry
from control_plane.generation import ModelDescription
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.channel import open_channel
from tandem_runtime.errors import ModelNotFound, TandemError, Unavailable, Unsupported
from tandem_runtime.log import get_logger
from tandem_runtime.model_table import SHIPPED, ModelTable
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_FETCH_SECONDS = 20.0
_MAX_KEPT = 32

Key = tuple[str, bytes, int]


class ModelCatalog:
    """Implements control_plane.generation.ModelCatalog from the cards of registered workers.

    Tokenizers are fetched from workers by digest and cached, so this host needs no model files.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        clock: Callable[[], float] = time.monotonic,
        *,
        models: ModelTable = SHIPPED,
        fallback_model: str = "",
    ) -> None:
        """`clock` returns monotonic seconds; `fallback_model` answers in place of models that are not loaded."""
        self._models = models
        self._fallback_model = fallback_model
        self._registry = registry
        self._clock = clock
        self._gone: dict[str, tuple[float, pb.ModelCard]] = {}
        self._assets: dict[bytes, bytes] = {}
        self._descriptions: dict[Key, ModelDescription] = {}
        self._problems: dict[str, str] = {}
        self._lock = asyncio.Lock()
        registry.listen(self._changed)

    @property
    def num_kept(self) -> int:
        """Cached descriptions, models that are gone included."""
        return len(self._descriptions)

    def card(self, name: str) -> pb.ModelCard:
        """Return the card of a model by id, alias or a name of the table; raises ModelNotFound with the served models.

        Where workers differ, return the card of a ready worker with the shortest context: every worker takes such
        requests. A model whose last worker has gone stays known for as long as requests wait for the worker.
        """
        cards = self._cards()
        known = (*cards, *self._lately_gone())
        for card in known:
            if name == card.model_id or name in card.aliases:
                return card
        for card in known:
            if name in self._models.names_of(card.model_id):
                return card
        served = ", ".join(sorted({card.model_id for card in cards})) or "nothing yet: no worker has loaded a model"
        raise ModelNotFound(f"no model {name!r} here; served: {served}", field="model")

    async def get(self, name: str) -> ModelDescription:
        card, is_fallback = self._card_or_fallback(name)
        model = await self._describe_once(card)
        if not is_fallback:
            return model
        requested = self._models.describes(name)  # its clients parse the answers, so the wire format stays
        return replace(model, is_fallback=True, wire_format=(requested and requested.wire_format) or "native")

    def _card_or_fallback(self, name: str) -> tuple[pb.ModelCard, bool]:
        try:
            return self.card(name), False
        except ModelNotFound as error:
            if not self._fallback_model or not self._models.writes_text(name):
                raise
            try:
                return self.card(self._fallback_model), True
            except ModelNotFound:
                raise error from None

    async def _describe_once(self, card: pb.ModelCard) -> ModelDescription:
        key = _key(card)
        if key not in self._descriptions:
            async with self._lock:
                if key not in self._descriptions:
                    self._descriptions[key] = await self._describe(card)
                    _drop_oldest(self._descriptions)
        return self._descriptions[key]

    def list(self) -> list[ModelDescription]:
        """Return the descriptions that are cached; `prefetch` fetches those of all served models."""
        keys = {_key(self.card(card.model_id)) for card in self._cards()}
        known = [description for key, description in self._descriptions.items() if key in keys]
        return sorted(known, key=lambda description: description.model_id)

    def problem_of(self, model_id: str) -> str:
        """Return why a served model cannot be used, though its workers are there; "" if it can."""
        return self._problems.get(model_id, "")

    async def prefetch(self) -> None:
        """Fetch the missing descriptions of served models.

        A model that cannot be described is not listed. The cause is logged when it is new; the next call tries again.
        """
        served = {card.model_id for card in self._cards()}
        self._problems = {model_id: why for model_id, why in self._problems.items() if model_id in served}
        for model_id in sorted(served):
            try:
                await self.get(model_id)
            except TandemError as error:
                if self._is_new_problem(model_id, error.message):
                    log.warning("model_description_failed", model=model_id, error=error.message)
            except Exception as error:  # a worker's files must not end the prober, nor keep other models from it
                if self._is_new_problem(model_id, message_of(error)):
                    log.exception("model_description_failed", model=model_id, error=message_of(error))
            else:
                self._problems.pop(model_id, None)

    def _is_new_problem(self, model_id: str, why: str) -> bool:
        before = self._problems.get(model_id)
        self._problems[model_id] = why
        return why != before

    def _cards(self) -> tuple[pb.ModelCard, ...]:
        """Return every worker's card; of each model the preferred card comes first."""
        workers = self._registry.workers(pb.WORKER_ROLE_DECODE) + self._registry.workers(pb.WORKER_ROLE_PREFILL)
        loaded = [worker for worker in workers if worker.info.card.model_id]
        loaded.sort(key=lambda worker: (not worker.is_usable, worker.info.card.context_length))
        return tuple(worker.info.card for worker in loaded)

    def _lately_gone(self) -> tuple[pb.ModelCard, ...]:
        return tuple(card for gone_at, card in self._gone.values() if self._clock() - gone_at < RESTART_SECONDS)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        """Remember the model of a worker that is gone; a listener of the registry."""
        if not is_here and worker.info.card.model_id:
            self._gone[worker.info.card.model_id] = self._clock(), worker.info.card
            _drop_oldest(self._gone)

    async def _describe(self, card: pb.ModelCard) -> ModelDescription:
        assets = {asset.name: await self._asset(asset) for asset in card.assets}
        if "tokenizer.json" not in assets:
            raise Unsupported(f"{card.model_id} has no tokenizer.json; add one to its folder and restart its workers")
        defaults, entry = card.generation_defaults, self._models.describes(card.model_id)
        return ModelDescription(
            model_id=card.model_id,
            aliases=tuple(dict.fromkeys((*card.aliases, *self._models.names_of(card.model_id)))),
            context_length=card.context_length,
            block_size=card.block_size,
            vocab_size=card.vocab_size,
            eos_token_ids=tuple(card.eos_token_ids),
            chat_template=card.chat_template,
            generation_defaults={field.name: float(value) for field, value in defaults.ListFields()},
            fingerprint=card.fingerprint.digest.hex(),
            numerics_class=card.fingerprint.numerics_class,
            created_unix_seconds=card.created_unix_seconds,
            architecture=card.architecture,
            num_parameters=card.num_parameters,
            wire_format=(entry and entry.wire_format) or "native",
            tokenizer_json=assets["tokenizer.json"],
            tokenizer_config=_tokenizer_config(card.model_id, assets.get("tokenizer_config.json", b"{}")),
        )

    async def _asset(self, asset: pb.Asset) -> bytes:
        """Return a file's bytes from any worker that has the file; raises Unavailable."""
        if asset.digest in self._assets:
            return self._assets[asset.digest]
        reason = "no worker offers it"
        for worker in self._registry.workers():
            if not any(other.digest == asset.digest for other in worker.info.card.assets):
                continue
            try:
                content = await _fetch(worker, asset)
            except TandemError as error:
                reason = error.message
            else:
                self._assets[asset.digest] = content
                _drop_oldest(self._assets)
                return content
        raise Unavailable(f"{asset.name} ({asset.digest.hex()}) could not be fetched: {reason}")


def _key(card: pb.ModelCard) -> Key:
    """Return the cache key: the same weights with another name or context length are another model to clients."""
    return card.model_id, card.fingerprint.digest, card.context_length


def _tokenizer_config(model_id: str, content: bytes) -> dict[str, Any]:
    """Parse a worker's file; raises Unavailable: the model cannot be served before its operator has mended the file."""
    remedy = "put the model's own file in its folder and restart its workers"
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"the tokenizer_config.json of {model_id} is not JSON: {error}; {remedy}") from error
    if not isinstance(config, dict):
        raise Unavailable(f"the tokenizer_config.json of {model_id} is not a JSON object; {remedy}")
    return config


def _drop_oldest(kept: dict[Any, Any]) -> None:
    """Bound the cache; dropped entries are fetched again."""
    while len(kept) > _MAX_KEPT:
        del kept[next(iter(kept))]


async def _fetch(worker: Worker, asset: pb.Asset) -> bytes:
    async with open_channel(worker.info.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        request = pb.AssetRequest(digest=asset.digest)
        content = b"".join([chunk.data async for chunk in stub.GetAsset(request, timeout=_FETCH_SECONDS)])
    if hashlib.blake2b(content, digest_size=16).digest() != asset.digest:
        raise Unavailable(f"worker {worker.worker_id} sent a {asset.name} that does not match its digest")
    return content

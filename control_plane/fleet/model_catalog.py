"""Describes the models that the registered workers serve, for the text pipeline and the API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast, get_args

from control_plane.fleet.model_variants import Variant
from control_plane.fleet.registry import RESTART_SECONDS, Worker, WorkerRegistry
from control_plane.generation import DEFAULT_GRAIN, EncoderFacts, ModelDescription, ModelTask
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import ModelNotFound, TandemError, Unavailable, Unsupported
from tandem_runtime.kv.spaces import model_identity
from tandem_runtime.log import get_logger
from tandem_runtime.model_table import SHIPPED, ModelTable
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_ROLES = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_ENCODE)
"""Of workers that have a model."""
_ANSWERING = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_ENCODE)
_FETCH_SECONDS = 20.0
_MAX_KEPT = 32

Key = tuple[str, Variant, int, bytes]

MAX_ASSET_BYTES = 256 << 20
"""Of a tokenizer's files; the largest of today's models are 34 MB."""


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
        member: FleetMember | None = None,
        grain: int = DEFAULT_GRAIN,
    ) -> None:
        """`clock` returns monotonic seconds; `fallback_model` answers in place of models that are not loaded.

        `grain`: tokens per hash of a prompt.
        """
        self._grain = grain
        self._models = models
        self._fallback_model = fallback_model
        self._registry = registry
        self._member = member
        self._clock = clock
        self._gone: dict[str, tuple[float, _Known]] = {}
        self._served: tuple[_Known, ...] | None = None
        """Of the registered workers; None: a worker has changed since."""
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
        """Return the card of a model by id, alias, a name of the table, or a short form; else raises ModelNotFound.

        Short forms are the id without `@`, and its last part: `tandem/demo` and `demo` for `@tandem/demo`.

        Where contexts differ, the card has the shortest one of the usable workers: every worker takes such requests.
        Where numerics classes or KV layouts differ, it is the card of the class that serves most. Where more differs,
        see model_variants. A model whose last worker has gone stays known for as long as requests wait for the worker.
        """
        return self._find(name).card

    def _find(self, name: str) -> _Known:
        known = (*self._known_of_workers(), *self._lately_gone())
        for each in known:
            if name == each.card.model_id:
                return each
        for each in known:
            if name in each.card.aliases:  # after all ids: no worker takes another model's name as its alias
                return each
        for each in known:
            if name in self._models.names_of(each.card.model_id):
                return each
        short = {
            each.card.model_id: each for each in reversed(known) if name and name in _short_forms(each.card.model_id)
        }
        if len(short) == 1:
            return next(iter(short.values()))
        if short:
            raise ModelNotFound(
                f"model {name!r} may be {' or '.join(sorted(short))}; send the whole name", field="model"
            )
        names = ", ".join(sorted(self._served_ids())) or "nothing yet: no worker has loaded a model"
        raise ModelNotFound(f"no model {name!r} here; served: {names}", field="model")

    async def get(self, name: str) -> ModelDescription:
        known, is_fallback = self._known_or_fallback(name)
        model = await self._describe_once(known)
        if not is_fallback:
            return model
        requested = self._models.describes(name)  # its clients parse the answers, so the wire format stays
        return replace(model, is_fallback=True, wire_format=(requested and requested.wire_format) or "native")

    def _known_or_fallback(self, name: str) -> tuple[_Known, bool]:
        try:
            return self._find(name), False
        except ModelNotFound as error:
            if not self._fallback_model or not self._models.writes_text(name):
                raise
            try:
                return self._find(self._fallback_model), True
            except ModelNotFound:
                raise error from None

    async def _describe_once(self, known: _Known) -> ModelDescription:
        key = known.key
        if key not in self._descriptions:
            async with self._lock:
                if key not in self._descriptions:
                    self._descriptions[key] = await self._describe(known.card)
                    _drop_oldest(self._descriptions)
        return self._descriptions[key]

    def list(self) -> list[ModelDescription]:
        """Return the descriptions that are cached; `prefetch` fetches those of all served models."""
        keys = {self._find(model_id).key for model_id in self._served_ids()}
        known = [description for key, description in self._descriptions.items() if key in keys]
        return sorted(known, key=lambda description: description.model_id)

    def problem_of(self, model_id: str) -> str:
        """Return why a served model cannot be used, though its workers are there; "" if it can."""
        return self._problems.get(model_id, "")

    async def prefetch(self) -> None:
        """Fetch the missing descriptions of served models.

        A model that cannot be described is not listed. The cause is logged when it is new; the next call tries again.
        """
        served = self._served_ids()
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

    def _served_ids(self) -> set[str]:
        return {each.card.model_id for each in self._known_of_workers()}

    def _known_of_workers(self) -> tuple[_Known, ...]:
        """Return the different cards of all workers; of each model the preferred one comes first.

        Every request asks for them, so they are sorted once after each change of a worker.
        """
        if self._served is None:
            workers = [worker for role in _ROLES for worker in self._registry.workers(role)]
            loaded = [worker for worker in workers if worker.info.card.model_id]
            loaded.sort(key=lambda worker: (worker.apart_for, not worker.is_usable))
            served: dict[Key, _Known] = {}
            for of_model in _by_variant(loaded).values():
                known = _Known.of(_of_largest_class(of_model), _shortest_context(of_model))
                served.setdefault(known.key, known)
            self._served = tuple(served.values())
        return self._served

    def _lately_gone(self) -> tuple[_Known, ...]:
        return tuple(known for gone_at, known in self._gone.values() if self._clock() - gone_at < RESTART_SECONDS)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        """Remember the model of a worker that is gone; a listener of the registry."""
        self._served = None
        if not is_here and worker.info.card.model_id:
            self._gone[worker.info.card.model_id] = self._clock(), _Known.of(worker, worker.info.card.context_length)
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
            vocab_size=card.vocab_size,
            eos_token_ids=tuple(card.eos_token_ids),
            chat_template=card.chat_template,
            generation_defaults={field.name: float(value) for field, value in defaults.ListFields()},
            identity=model_identity(card.fingerprint).hex(),
            hash_grain=self._grain,
            fingerprint=card.fingerprint.digest.hex(),
            numerics_class=card.fingerprint.numerics_class,
            created_unix_seconds=card.created_unix_seconds,
            architecture=card.architecture,
            num_parameters=card.num_parameters,
            wire_format=(entry and entry.wire_format) or "native",
            tokenizer_json=assets["tokenizer.json"],
            task=task_of(card),
            encoder=encoder_facts(card),
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
                content = await _fetch(worker, asset, self._member)
            except TandemError as error:
                reason = error.message
            else:
                self._assets[asset.digest] = content
                _drop_oldest(self._assets)
                return content
        raise Unavailable(f"{asset.name} ({asset.digest.hex()}) could not be fetched: {reason}")


def task_of(card: pb.ModelCard) -> ModelTask:
    """Return the task of a card. Raise Unsupported for one that this gateway does not know."""
    task = next((each for each in get_args(ModelTask) if each == (card.task or "text-generation")), None)
    if task is None:
        raise Unsupported(f"{card.model_id} is for the task {card.task!r}, which this gateway does not know; update it")
    return cast(ModelTask, task)


def encoder_facts(card: pb.ModelCard) -> EncoderFacts | None:
    if not card.HasField("encoder"):
        return None
    encoder = card.encoder
    return EncoderFacts(
        encoder.num_values, tuple(encoder.labels), encoder.pooling, encoder.is_normalized, encoder.has_pairs
    )


class _Known(NamedTuple):
    """A card, and the cache key: the same weights with another name or context are another model to clients."""

    key: Key
    card: pb.ModelCard

    @classmethod
    def of(cls, worker: Worker, context_length: int) -> _Known:
        """Return a worker's card with this context length."""
        card = worker.info.card
        if card.context_length != context_length:
            card = pb.ModelCard()
            card.CopyFrom(worker.info.card)
            card.context_length = context_length
        return cls((card.model_id, worker.variant, context_length, card.fingerprint.digest), card)


def _by_variant(workers: Iterable[Worker]) -> dict[tuple[str, Variant], list[Worker]]:
    """Return the workers of each model and variant, in their order."""
    found: dict[tuple[str, Variant], list[Worker]] = {}
    for worker in workers:
        found.setdefault((worker.info.card.model_id, worker.variant), []).append(worker)
    return found


def _of_largest_class(workers: Sequence[Worker]) -> Worker:
    """Return a worker of the class that most usable workers with answers have; of the first one at a tie."""
    num_usable = Counter(_class_of(worker) for worker in workers if worker.is_usable and worker.role in _ANSWERING)
    return max(workers, key=lambda worker: (num_usable[_class_of(worker)], worker.is_usable))  # the first of equals


def _class_of(worker: Worker) -> bytes:
    return worker.info.card.fingerprint.digest


def _shortest_context(workers: Sequence[Worker]) -> int:
    usable = [worker for worker in workers if worker.is_usable]
    return min(worker.info.card.context_length for worker in usable or workers)


def _short_forms(model_id: str) -> tuple[str, str]:
    bare = model_id.removeprefix("@")
    return bare, bare.rpartition("/")[2]


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


async def _fetch(worker: Worker, asset: pb.Asset, member: FleetMember | None) -> bytes:
    async with open_worker_channel(worker.info, member) as channel:
        is_encoder = worker.role == pb.WORKER_ROLE_ENCODE
        stub: Any = (worker_pb2_grpc.EncodeServiceStub if is_encoder else worker_pb2_grpc.WorkerServiceStub)(channel)
        request = pb.AssetRequest(digest=asset.digest)
        content = bytearray()
        async for chunk in stub.GetAsset(request, timeout=_FETCH_SECONDS):
            content += chunk.data
            if len(content) > MAX_ASSET_BYTES:
                raise Unavailable(
                    f"worker {worker.worker_id} sends more than {MAX_ASSET_BYTES:,} bytes as {asset.name}; "
                    "check the model's folder there"
                )
    if hashlib.blake2b(content, digest_size=16).digest() != asset.digest:
        raise Unavailable(f"worker {worker.worker_id} sent a {asset.name} that does not match its digest")
    return bytes(content)

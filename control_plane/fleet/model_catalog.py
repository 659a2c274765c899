"""Describes the models that the registered workers serve, for the text pipeline and the API.

What is served is described once and kept. Of what is gone, a bounded number of bytes is kept, since it may come back.
A model whose files cannot be used is an event, and no other model notices.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple, Protocol, cast, get_args

from control_plane.fleet.model_files import BrokenFile, ModelFiles, TooLarge
from control_plane.fleet.model_variants import Variant
from control_plane.fleet.registry import RESTART_SECONDS, Worker, WorkerRegistry
from control_plane.generation import DEFAULT_GRAIN, Adapter, EncoderFacts, ModelDescription, ModelTask
from control_plane.kept_bytes import DEFAULT_BYTES, KeptBytes
from control_plane.pauses import Pauses
from tandem.v1 import types_pb2 as pb
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import InternalError, ModelNotFound, TandemError, Unavailable, Unsupported
from tandem_runtime.kv.spaces import model_identity
from tandem_runtime.log import get_logger
from tandem_runtime.model_table import SHIPPED, ModelTable
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_ROLES = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_ENCODE)
"""Of workers that have a model."""
_RETRY_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 8.0
"""Between two tries to describe a model; each pause is twice as long as the one before."""
_BROKEN_SECONDS = 10.0
_MAX_BROKEN_SECONDS = 320.0
"""The same if the file itself cannot be used: it is fetched whole each time, and stays as it is."""
REGISTRATION_SECONDS = 10.0
"""Workers that live call a gateway within a second of one another once it can be reached; one may be starting again."""
SETTLING_SECONDS = 1.5
"""So long a gateway that comes to a fleet at work holds requests back: workers and KV services call it within a second
of one another, and then it reads which blocks they have. Sent at once, requests would not go to their blocks."""
_MAX_GONE = 1024
_DESCRIPTION_BYTES = 4096
"""Of a description without its files."""
_ANSWERING = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_ENCODE)

Key = tuple[str, Variant, int, bytes]


class TextLoader(Protocol):
    """Loads tokenizers where that can do no harm."""

    def is_loaded(self, model: ModelDescription) -> bool:
        """Return whether the model's text can be prepared at once."""

    async def load(self, model: ModelDescription) -> None:
        """Load the model's tokenizer and chat template. Raise TandemError if they cannot be used."""


@dataclass(frozen=True)
class _Described:
    description: ModelDescription
    digest: bytes
    """Of its tokenizer.json."""


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
        loader: TextLoader | None = None,
        max_gone_bytes: int = DEFAULT_BYTES,
        grain: int = DEFAULT_GRAIN,
        registration_seconds: float = 0.0,
        settling_seconds: float = 0.0,
    ) -> None:
        """`clock` returns monotonic seconds; `fallback_model` answers in place of models that are not loaded.

        `loader` shows whether a model's tokenizer and template can be used, before any request needs them.
        `registration_seconds`: so long after the first worker with a model `get` waits for one that none has told of.
        `settling_seconds`: so long after it `get` waits for any model, if that worker has been at work before.
        `max_gone_bytes`: what is kept of models that are not served any more. `grain`: tokens per hash of a prompt.
        """
        self._grain = grain
        self._models = models
        self._fallback_model = fallback_model
        self._registry = registry
        self._loader = loader
        self._clock = clock
        self._gone: dict[str, tuple[float, _Known]] = {}
        self._served: tuple[_Known, ...] | None = None
        """Of the registered workers; None: a worker has changed since."""
        self._files = ModelFiles(registry, member)
        self._described: dict[Key, _Described] = {}
        self._kept: KeptBytes[Key] = KeptBytes(max_gone_bytes)
        self._describing: dict[Key, asyncio.Task[ModelDescription]] = {}
        self._failures: Pauses[tuple[str, Variant]] = Pauses(clock)
        """By model and variant: its workers have the same files."""
        self._preparing: set[str] = set()
        self._problems: dict[str, str] = {}
        self._were_usable: set[tuple[str, Variant]] = set()
        self._registration_seconds = registration_seconds
        self._knows_all_at: float | None = None
        """By the clock: from then on all workers that live have registered. None: none with a model has."""
        self._settling_seconds = settling_seconds
        self._settled_at = 0.0
        """By the clock: from then on the fleet's workers and blocks are known."""
        self._loading: set[str] = set()
        """Workers that came without a model, while none with one had come: they start together with this gateway."""
        self._change = asyncio.Event()
        """Set at the next change of a worker, and then replaced."""
        self._to_try_again: list[tuple[str, Variant]] = []
        """Variants that may be usable after all, since another worker offers their files."""
        registry.listen(self._changed)

    @property
    def num_kept(self) -> int:
        """Cached descriptions, models that are gone included."""
        return len(self._described)

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
        served = sorted(self._served_ids())
        if not served:  # this gateway has just started, or has lost its fleet: nobody knows whether the name is wrong
            why = "no worker has loaded a model yet; send the request again in a moment, here or to another gateway"
            raise Unavailable(why, retry_after_seconds=2.0)
        raise ModelNotFound(f"no model {name!r} here; served: {', '.join(served)}", field="model")

    async def _wait_for(self, name: str) -> None:
        """Wait for a model that no worker has told of, while its workers may still come: those of others came first."""
        base = name.rpartition(":")[0]
        while self._knows_all_at is not None and (seconds := self._knows_all_at - self._clock()) > 0:
            if self._knows(name) or (base and self._knows(base)):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._change.wait()

    async def get(self, name: str) -> ModelDescription:
        if (seconds := self._settled_at - self._clock()) > 0:
            await asyncio.sleep(seconds)
        await self._wait_for(name)
        if (found := self._with_adapter(name)) is not None:
            known, adapter = found
            return replace(await self._described_for_request(known), adapter=adapter)
        known, is_fallback = self._known_or_fallback(name)
        model = await self._described_for_request(known)
        if not is_fallback:
            return model
        requested = self._models.describes(name)  # its clients parse the answers, so the wire format stays
        return replace(model, is_fallback=True, wire_format=(requested and requested.wire_format) or "native")

    def _with_adapter(self, name: str) -> tuple[_Known, Adapter] | None:
        """Return model and adapter of a name "model:adapter"; None if no served model has that name before a colon.

        Raises ModelNotFound for an adapter that the model's workers do not have. A whole name takes precedence.
        """
        base, colon, asked = name.rpartition(":")
        if not colon or not base or self._knows(name) or not self._knows(base):
            return None
        known = self._find(base)
        return known, adapter_named(asked, known.card.model_id, adapters_of(known.card))

    def _knows(self, name: str) -> bool:
        try:
            self._find(name)
        except (ModelNotFound, Unavailable):
            return False
        return True

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

    async def _described_for_request(self, known: _Known) -> ModelDescription:
        """Return a description. Raise TandemError: while no worker sends the files one without `problem_of`'s text."""
        try:
            return await self._describe_once(known)
        except BrokenFile:
            raise
        except Unavailable as error:
            raise Unavailable(
                f"this gateway has not got the files of {known.card.model_id} from its workers yet; send the request "
                "again in a moment, here or to another gateway",
                retry_after_seconds=2.0,
            ) from error

    async def _describe_once(self, known: _Known) -> ModelDescription:
        """Return a description, from now on kept. Raise TandemError, also for a failure of some seconds ago."""
        key = known.key
        if (kept := self._described.get(key)) is not None:
            self._kept.use(key)
            return kept.description
        self._failures.raise_if_paused(known.files)
        describing = self._describing.get(key)
        if describing is None:
            describing = self._describing[key] = asyncio.create_task(self._describe_and_keep(known), name="describe")
            describing.add_done_callback(lambda task: self._described_or_failed(key, task))
        return await asyncio.shield(describing)  # a caller that leaves must not end it for others

    def _described_or_failed(self, key: Key, task: asyncio.Task[ModelDescription]) -> None:
        del self._describing[key]
        if not task.cancelled():
            task.exception()  # every caller may have left

    async def _describe_and_keep(self, known: _Known) -> ModelDescription:
        key = known.key
        try:
            description = await self._describe(known.card)
        except TandemError as error:
            is_broken = isinstance(error, BrokenFile)
            pauses = (_BROKEN_SECONDS, _MAX_BROKEN_SECONDS) if is_broken else (_RETRY_SECONDS, _MAX_PAUSE_SECONDS)
            self._failures.failed(known.files, error, *pauses)
            raise
        self._failures.forget(known.files)
        assets = {asset.name: asset for asset in known.card.assets}
        digest = assets["tokenizer.json"].digest
        self._described[key] = _Described(description, digest)
        self._files.keep(digest, description.tokenizer_json)
        self._kept.put(key, len(description.tokenizer_json) + len(description.chat_template) + _DESCRIPTION_BYTES)
        self._drop_what_is_gone()
        return description

    def _drop_what_is_gone(self) -> None:
        """Drop what is not served, beyond the bound, the least recently used first."""
        served = {known.key for known in self._known_of_workers()}
        for key in self._kept.excess(served):
            del self._described[key]
        self._files.keep_only({described.digest for described in self._described.values()})

    def list(self) -> list[ModelDescription]:
        """Return the descriptions of served models that can be used, as far as they are known."""
        keys = [known.key for model_id, known in self._preferred().items() if model_id not in self._problems]
        known = [self._described[key].description for key in keys if key in self._described]
        return sorted(known, key=lambda description: description.model_id)

    def problem_of(self, model_id: str) -> str:
        """Return why a served model cannot be used, though its workers are there; "" if it can."""
        return self._problems.get(model_id, "")

    def without_files(self) -> frozenset[str]:
        """Return the served models whose files no worker has sent yet: requests for them cannot be read."""
        here = {key[:2] for key in self._described}
        return frozenset(model_id for model_id, known in self._preferred().items() if known.files not in here)

    def served_text_keys(self) -> frozenset[str]:
        """Return the text keys of all served models that are described."""
        keys = (known.key for known in self._known_of_workers())
        return frozenset(self._described[key].description.text_key for key in keys if key in self._described)

    async def run(self) -> None:
        """Describe served models, and have their texts loaded, side by side until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for known in self._unprepared():
                    tasks.create_task(self._prepare(known))
                await asyncio.sleep(_RETRY_SECONDS)

    async def prefetch(self) -> None:
        """Describe every served model that is not described yet. A model that cannot be described is not listed."""
        await asyncio.gather(*(self._prepare(known) for known in self._unprepared()))

    def _unprepared(self) -> tuple[_Known, ...]:
        """Return what is to be prepared now of each served model, and note that it is being prepared."""
        for model_id, variant in self._to_try_again:
            self._registry.set_unusable(model_id, variant, False)
        self._to_try_again.clear()
        preferred = self._preferred()
        self._were_usable &= {known.files for known in self._known_of_workers()}
        self._problems = {model_id: why for model_id, why in self._problems.items() if model_id in preferred}
        found = tuple(known for known in preferred.values() if self._is_unprepared(known))
        self._preparing.update(known.card.model_id for known in found)
        return found

    def _is_unprepared(self, known: _Known) -> bool:
        model_id, described = known.card.model_id, self._described.get(known.key)
        if model_id in self._preparing:
            return False
        if described is None or model_id in self._problems:
            return True
        return self._loader is not None and not self._loader.is_loaded(described.description)

    async def _prepare(self, known: _Known) -> None:
        """Describe one model and have its text loaded. What is wrong with it is logged when it is new."""
        model_id, variant = known.files
        try:
            description = await self._describe_once(known)
            if self._loader is not None:
                try:
                    await self._loader.load(description)
                except InternalError as error:
                    raise BrokenFile(error.message) from error
                except Unavailable:  # the text processes begin anew, which tells nothing of the file
                    return
        except TandemError as error:
            if self._is_new_problem(model_id, error.message):
                log.warning("model_unusable", model=model_id, error=error.message)
            # What was usable once stays in use: a lack of memory here must not hand the model to a rogue's files.
            if isinstance(error, BrokenFile) and (model_id, variant) not in self._were_usable:
                self._registry.set_unusable(model_id, variant, True)
        except Exception as error:  # a worker's files must not end this loop, nor keep other models from it
            if self._is_new_problem(model_id, message_of(error)):
                log.exception("model_unusable", model=model_id, error=message_of(error))
        else:
            self._problems.pop(model_id, None)
            self._were_usable.add((model_id, variant))
            self._registry.set_unusable(model_id, variant, False)
        finally:
            self._preparing.discard(model_id)

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

    def _preferred(self) -> dict[str, _Known]:
        """Return what counts of each served model: its preferred card."""
        return {known.card.model_id: known for known in reversed(self._known_of_workers())}

    def _lately_gone(self) -> tuple[_Known, ...]:
        return tuple(known for gone_at, known in self._gone.values() if not self._is_over(gone_at))

    def _changed(self, worker: Worker, is_here: bool) -> None:
        """Remember the model of a worker that is gone; a listener of the registry."""
        self._served = None
        self._change.set()
        self._change = asyncio.Event()
        if not worker.info.card.model_id:
            if self._knows_all_at is None:
                self._loading.add(worker.worker_id)
            return
        known = _Known.of(worker, worker.info.card.context_length)
        if is_here:
            if self._knows_all_at is None:
                self._knows_all_at = self._clock() + self._registration_seconds
                if worker.worker_id not in self._loading:
                    self._settled_at = self._clock() + self._settling_seconds
                self._loading.clear()
            error = self._failures.last(known.files)
            if error is not None and (isinstance(error, TooLarge) or not isinstance(error, BrokenFile)):
                self._failures.forget(known.files)  # this worker may have what the others did not give
                self._to_try_again.append((known.card.model_id, worker.variant))
            return
        self._gone.pop(known.card.model_id, None)
        self._gone[known.card.model_id] = self._clock(), known
        while len(self._gone) > _MAX_GONE or self._is_over(next(iter(self._gone.values()))[0]):
            del self._gone[next(iter(self._gone))]

    def _is_over(self, gone_at: float) -> bool:
        return self._clock() - gone_at >= RESTART_SECONDS

    async def _describe(self, card: pb.ModelCard) -> ModelDescription:
        assets = {asset.name: asset for asset in card.assets}
        if "tokenizer.json" not in assets:
            raise Unsupported(f"{card.model_id} has no tokenizer.json; add one to its folder and restart its workers")
        config = assets.get("tokenizer_config.json")
        special_tokens = await self._files.special_tokens(card.model_id, config) if config is not None else {}
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
            tokenizer_json=await self._files.tokenizer_json(assets["tokenizer.json"]),
            task=task_of(card),
            encoder=encoder_facts(card),
            tokenizer_config=special_tokens,
            text_digest=_text_digest(card),
            adapters=adapters_of(card),
        )


def adapters_of(card: pb.ModelCard) -> tuple[Adapter, ...]:
    """Return the LoRA adapters that a worker with this card has loaded."""
    return tuple(Adapter(adapter.name, adapter.digest) for adapter in card.adapters)


def adapter_named(name: str, model_id: str, adapters: Sequence[Adapter]) -> Adapter:
    """Return one of a model's adapters; raises ModelNotFound, which names them."""
    for adapter in adapters:
        if adapter.name == name:
            return adapter
    names = ", ".join(adapter.name for adapter in adapters) or "none; start its workers with --adapters"
    raise ModelNotFound(f"no adapter {name!r} of {model_id} here; its adapters: {names}", field="model")


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

    @property
    def files(self) -> tuple[str, Variant]:
        """Model id and variant: whatever has the same has the same files."""
        return self.key[0], self.key[1]

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


def _text_digest(card: pb.ModelCard) -> str:
    """Return a digest of all that text processes load for a model."""
    parts = sorted((asset.name, asset.digest) for asset in card.assets)
    return blake2b(repr((parts, card.chat_template)).encode(), digest_size=16).hexdigest()

"""Decides which of the workers under one model name get its requests, where their cards differ.

Two workers with one model name may have different weights, tokenizers or chat templates: during an upgrade, by mistake,
or because one of them wants other tenants' prompts. A request must be rendered and tokenized for the worker that gets
it. So one variant of the model is in use at a time, and the workers of the others are kept apart: registered, shown by
`tandem status`, without requests. Workers that differ in numerics class or KV layout alone are one variant: the router
tells them apart (routing/groups.py).

The variant in use is the one with a ready decode or encode worker and the most ready workers; at a tie, the one in use
before. So one worker alone replaces nobody, an upgrade moves over when most workers have the new weights, and the last
old worker need not stop before the first new one is used. A variant whose files cannot be used gives way to any other.

A worker whose block is no multiple of the fleet's grain is always kept apart: no hash of a prompt ends where its blocks
do.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.spaces import model_identity

_SHARED_FIELDS = (
    "block_size",
    "identity",
    "assets",
    "chat_template",
    "eos_token_ids",
    "vocab_size",
    "aliases",
    "encoder",
    "adapters",
)
"""The fields of a card by which prompts are rendered, tokenized and hashed. Context lengths may differ.

Of block sizes, all multiples of the grain count as equal.
"""
_FITS = b""
"""Stands in a variant for every block size that is a multiple of the grain."""

_ANSWERING = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_ENCODE)
"""Roles whose workers give answers; a prefill worker alone serves nobody."""

Variant = tuple[bytes, ...]


class Candidate(Protocol):
    """A registered worker."""

    @property
    def role(self) -> pb.WorkerRole.ValueType: ...

    @property
    def variant(self) -> Variant: ...

    @property
    def is_ready(self) -> bool: ...


class ModelVariants:
    """Counts the variants of each model and remembers the one in use. Owned by the registry."""

    def __init__(self) -> None:
        self._num_registered: dict[str, Counter[Variant]] = {}
        self._in_use: dict[str, Variant] = {}
        self._unusable: set[tuple[str, Variant]] = set()
        """Whose files cannot be used; a variant is forgotten with its last worker."""

    def add(self, model_id: str, variant: Variant) -> None:
        self._num_registered.setdefault(model_id, Counter())[variant] += 1

    def remove(self, model_id: str, variant: Variant) -> None:
        counts = self._num_registered[model_id]
        counts[variant] -= 1
        if not counts[variant]:
            del counts[variant]
            self._unusable.discard((model_id, variant))
        if not counts:
            del self._num_registered[model_id]
            self._in_use.pop(model_id, None)

    def set_unusable(self, model_id: str, variant: Variant, is_unusable: bool) -> bool:
        """Note whether the files of a variant can be used. Return whether that is new."""
        key = model_id, variant
        if ((key in self._unusable) == is_unusable) or variant not in self._num_registered.get(model_id, ()):
            return False
        (self._unusable.add if is_unusable else self._unusable.discard)(key)
        return True

    def is_mixed(self, model_id: str) -> bool:
        """Whether workers of the model differ; almost always not, and then nothing is to be chosen."""
        variants = self._num_registered.get(model_id, ())
        return len(variants) > 1 or not all(map(_fits, variants))

    def choose(self, model_id: str, workers: Sequence[Candidate]) -> list[str]:
        """Return for each worker of the model why it is kept apart, by the field that differs; "" if it is not."""
        if not workers:
            return []
        chosen = self._in_use[model_id] = self._chosen(model_id, workers)
        return [_first_difference(worker.variant, chosen) for worker in workers]

    def _chosen(self, model_id: str, workers: Sequence[Candidate]) -> Variant:
        num_ready = Counter(worker.variant for worker in workers if worker.is_ready)
        can_serve = {worker.variant for worker in workers if worker.is_ready and worker.role in _ANSWERING}
        # max() keeps the first of equals: the variant of the worker that has been registered for longest.
        variants = dict.fromkeys(worker.variant for worker in workers)
        return max(variants, key=lambda each: self._rank(model_id, each, can_serve, num_ready))

    def _rank(
        self, model_id: str, variant: Variant, can_serve: Collection[Variant], num_ready: Mapping[Variant, int]
    ) -> tuple[bool, bool, bool, int, bool]:
        is_usable = (model_id, variant) not in self._unusable
        is_in_use = variant == self._in_use.get(model_id)
        return _fits(variant), is_usable, variant in can_serve, num_ready[variant], is_in_use


def variant_of(card: pb.ModelCard, grain: int) -> Variant:
    """Return a digest of each field that the workers of a model must share."""
    identity = model_identity(card.fingerprint)
    assets = sorted((asset.name, asset.digest) for asset in card.assets)
    values = (identity, assets, card.chat_template, list(card.eos_token_ids), card.vocab_size)
    encoder = card.task, card.encoder.SerializeToString(deterministic=True)
    block_size = _digest(card.block_size) if card.block_size % grain else _FITS
    adapters = sorted((adapter.name, adapter.digest) for adapter in card.adapters)
    return (block_size, *(_digest(value) for value in (*values, sorted(card.aliases), encoder, adapters)))


def remedy_of(reason: str, block_size: int, grain: int) -> str:
    """Return what an operator can do about a worker that is kept apart for this reason; "" if it is not."""
    if reason == "block_size":
        return (
            f"its blocks have {block_size} tokens, which is no multiple of the gateway's --hash-grain, {grain}; "
            "start it with another --block-size, or all gateways with another --hash-grain"
        )
    if reason == "adapters":
        return "give all workers of the model the same --adapters"
    return "give all workers of the model the same files" if reason else ""


def _fits(variant: Variant) -> bool:
    return variant[:1] in ((), (_FITS,))


def _digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _first_difference(variant: Variant, chosen: Variant) -> str:
    if not _fits(variant):
        return "block_size"
    for name, ours, theirs in zip(_SHARED_FIELDS, variant, chosen, strict=True):
        if ours != theirs:
            return name
    return ""

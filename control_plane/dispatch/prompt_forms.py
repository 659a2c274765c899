"""Keeps the forms of one prompt that its workers receive; each is computed once and shared by all calls.

    grain      hashes of the fleet's grain: for every worker that takes spaces
    private    the same without public blocks: for workers whose last whole block would lie within the public text
    0.2        hashes of the worker's own fingerprint and block size: for a worker of release 0.2
    plain      token ids alone: no cache may hold the prompt

The forms after the first are computed when a route includes a worker that needs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from control_plane.block_chain import BlockHashes
from control_plane.dispatch.block_hashes import (
    INLINE_TOKENS,
    PromptHashes,
    hash_prompt,
    packed,
    wire_hashes,
    wire_ids,
)
from control_plane.generation import TokenRequest
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.block_hash import BlockHash, hash_packed_blocks

_Key = tuple[bytes, int]


@dataclass(frozen=True, eq=False)
class PromptForm:
    """A prompt as one kind of worker receives it."""

    wire: bytes = field(repr=False)
    """A serialized Submit that has the prompt's token ids and block hashes only; one object for all calls."""
    hashes: PromptHashes | None
    """None if no cache may hold the prompt."""


class PromptForms:
    """The forms of one request's prompt."""

    def __init__(self, request: TokenRequest, hashes: PromptHashes | None) -> None:
        self._request = request
        self._hashes = hashes
        self._ids = b""
        self._forms: dict[_Key, PromptForm] = {}

    def of(self, card: pb.ModelCard) -> PromptForm:
        """Return the form for a worker with this card."""
        key = self._key(card)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._with_ids(self._hashes_of(card))
        return form

    async def prepare(self, cards: Iterable[pb.ModelCard]) -> None:
        """Compute the forms for these workers; those of long prompts in a thread, which takes a turn of the loop."""
        if self._hashes is None or len(self._request.token_ids) <= INLINE_TOKENS:
            return
        for card in cards:
            key = self._key(card)
            if key not in self._forms and key != _GRAIN:
                self._forms[key] = self._with_ids(await asyncio.to_thread(self._hashes_of, card))

    def _key(self, card: pb.ModelCard) -> _Key:
        """Return what distinguishes the form for this worker from the others."""
        if self._hashes is None:
            return _GRAIN
        if not card.takes_spaces:
            return card.fingerprint.digest, card.block_size
        return _GRAIN if _ends_private(self._hashes, card.block_size) else _PRIVATE

    def _hashes_of(self, card: pb.ModelCard) -> PromptHashes | None:
        hashes, key = self._hashes, self._key(card)
        if hashes is None or key == _GRAIN:
            return hashes
        token_ids = self._request.token_ids
        if key == _PRIVATE:
            blocks = BlockHashes(hash_packed_blocks(BlockHash(hashes.root), packed(token_ids), hashes.grain))
            return replace(hashes, blocks=blocks, num_public_blocks=0, wire=wire_hashes(blocks))
        digest, size = key
        own = hash_prompt(digest, token_ids, hashes.salt, hashes.account_tag, hashes.num_public_tokens, size)
        bounds = (_in_blocks(bound, hashes.grain, size) for bound in (hashes.max_found_blocks, hashes.max_left_blocks))
        max_found, max_left = bounds
        return replace(own, max_found_blocks=max_found, max_left_blocks=max_left)

    def _with_ids(self, hashes: PromptHashes | None) -> PromptForm:
        if not self._ids:
            wire = self._request.wire
            self._ids = wire_ids(self._request.token_ids) if wire is None else wire.token_ids
        return PromptForm(self._ids + (b"" if hashes is None else hashes.wire), hashes)


_GRAIN: _Key = b"", 0
_PRIVATE: _Key = b"", 1


def _ends_private(hashes: PromptHashes, block_size: int) -> bool:
    """Return whether a worker's last whole block lies outside the public text.

    The worker continues the chain from that block. If all accounts shared it, they would share the answer's blocks.
    """
    num_grains = max(1, block_size // hashes.grain)
    return hashes.num_public_blocks // num_grains < max(1, len(hashes.blocks) // num_grains)


def _in_blocks(num_grains: int | None, grain: int, block_size: int) -> int | None:
    return None if num_grains is None else num_grains * grain // block_size

"""What the prefix index answers: how many leading blocks of a prompt each pool and each host's store has."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_NOWHERE: Mapping[str, int] = {}


class CachedPrefix(msgspec.Struct, frozen=True, gc=False):
    """The leading tokens of a prompt that one worker finds cached; each part follows the one before."""

    own: int = 0
    """In the worker's own pool."""
    host: int = 0
    """In its host's store."""
    remote: int = 0
    """In the store of `remote_host` only."""
    remote_host: str = ""
    source: str = ""
    """The address of the KV service of `remote_host`."""
    source_id: str = ""
    """Its worker id."""


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """How many leading blocks of one prompt each pool and each host's store has."""

    pools: Mapping[str, int] = _NOWHERE
    """By incarnation."""
    hosts: Mapping[str, int] = _NOWHERE

"""The classes of requests. A higher class is served first; workers get its number as the request's priority."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum


class ServiceClass(IntEnum):
    BATCH = -1
    """Served while no other class waits."""
    DEFAULT = 0
    PRIORITY = 1


HEADER_TIERS = ("default", "batch", "flex", "priority")
_BATCH_TIERS = ("batch", "flex")


def class_of(tier: str, account: str, priority_accounts: Collection[str]) -> ServiceClass:
    """Return the class of a request that asks for `tier`, by OpenAI's name or "batch"; "": for none.

    `priority_accounts` may ask for the priority class ("*": all may); other accounts get the default class.
    """
    if tier in _BATCH_TIERS:
        return ServiceClass.BATCH
    may = account in priority_accounts or "*" in priority_accounts
    return ServiceClass.PRIORITY if tier == "priority" and may else ServiceClass.DEFAULT

"""The classes of requests. A higher class is served first; workers get its number as the request's priority."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum


class ServiceClass(IntEnum):
    BATCH = -1
    """Served while no other class waits."""
    DEFAULT = 0
    PRIORITY = 1


def class_of(service_tier: str | None, account: str, priority_accounts: Collection[str], *, is_batch: bool) -> int:
    """Return the class of a request.

    `service_tier`: OpenAI's field; None: not sent. `is_batch`: a header of the request asks for the batch class.
    `priority_accounts` may ask for the priority class ("*": all may); other accounts get the default class.
    """
    if is_batch or service_tier == "flex":
        return ServiceClass.BATCH
    may = account in priority_accounts or "*" in priority_accounts
    return ServiceClass.PRIORITY if service_tier == "priority" and may else ServiceClass.DEFAULT

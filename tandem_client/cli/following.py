"""Asks a gateway again and again, also while it is away: its restart does not end a command that watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tandem_client.errors import TandemAPIError, TandemConnectionError

T = TypeVar("T")


def will_pass(error: TandemAPIError) -> bool:
    """Return whether the same question may get an answer later: no connection, or a gateway that has just started."""
    return isinstance(error, TandemConnectionError) or (error.status or 0) >= 500


def ask_until_answered(
    ask: Callable[[], T], on_away: Callable[[TandemAPIError], None], pause_seconds: float = 1.0
) -> T:
    """Return the first answer. `on_away` is called once, before the first pause. Raise errors that do not pass."""
    is_away = False
    while True:
        try:
            return ask()
        except TandemAPIError as error:
            if not will_pass(error):
                raise
            if not is_away:
                on_away(error)
            is_away = True
        time.sleep(pause_seconds)

"""Rotates the fleet's certificate authority while requests run.

added      a second authority is trusted; every member hears of it with a heartbeat, and renews
switched   once all members trust the second one, it issues; refused before
left       the old one is trusted no more, a minute after its last certificate has expired: with a certificate that was
           issued while the clock was ahead by an hour, that is after the run
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from control_plane.fleet_identity.certificate_authority import CertificateAuthority
from tandem_runtime.errors import InvalidRequest, Unavailable
from tests.system.fleet import until

_SWITCH_SECONDS = 90.0
_LEAVE_SECONDS = 180.0


class Rotations:
    """Rotates every `every_seconds`, as `tandem fleet rotate-ca` and `--switch` do; one rotation at a time."""

    def __init__(self, authority: CertificateAuthority, every_seconds: float) -> None:
        self.num_switched = 0
        self.num_left = 0
        self._authority = authority
        self._every_seconds = every_seconds
        self._refusal = ""

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Rotate until `is_over()`; a rotation that has begun gets as far as its switch. Fails if it does not."""
        while not is_over():
            await until_either(lambda: False, is_over, self._every_seconds)
            if is_over():
                return
            await self._rotate(is_over)

    async def _rotate(self, is_over: Callable[[], bool]) -> None:
        if not await until_either(self._add, is_over, float("inf")):
            return
        await until(self._switch, _SWITCH_SECONDS, lambda: f"no switch to the new authority: {self._refusal}")
        self.num_switched += 1
        if await until_either(self._has_left, is_over, _LEAVE_SECONDS):
            self.num_left += 1
        elif not is_over():
            assert await self._leaves_late(), (
                f"the old authority is still trusted {_LEAVE_SECONDS:g} s after the switch"
            )
            await until_either(self._has_left, is_over, float("inf"))

    async def _add(self) -> bool:
        try:
            await self._authority.add_authority()
        except (InvalidRequest, Unavailable):  # a clock that was set back trusts the old one again; the disk is full
            return False
        return True

    async def _switch(self) -> bool:
        try:
            await self._authority.switch_authority()
        except (InvalidRequest, Unavailable) as error:  # not all members trust it yet
            self._refusal = error.message
            return False
        return True

    async def _leaves_late(self) -> bool:
        """Return whether the old authority has issued a certificate while the clock was ahead by an hour."""
        trust = await self._authority.trust()
        return (trust.oldest.leaves_ms or 0) - trust.now_ms > _LEAVE_SECONDS * 1000

    async def _has_left(self) -> bool:
        try:
            return len((await self._authority.trust()).trusted) == 1
        except Unavailable:
            return False


async def until_either(condition: Callable[[], object], is_over: Callable[[], bool], seconds: float) -> bool:
    """Return True once the condition holds, False once the run is over or `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return True
        await asyncio.sleep(0.2)
    return False

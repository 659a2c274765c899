"""Which prompts have killed workers, and are not to be run again for a while?"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable

from control_plane.generation import TokenRequest
from tandem_runtime.errors import Aborted
from tandem_runtime.log import get_logger

log = get_logger(__name__)

MAX_DEATHS_IN_A_ROW = 3
"""Workers that died under a request since its last new token: who gets on between two deaths is not the cause."""
MAX_DEATHS = 10
"""The same in all, whether it got on or not."""
_SECONDS = 600.0
_MAX_PROMPTS = 1000


class Quarantined(Aborted):
    """The gateway's own: trying again would cost the next worker."""


class Quarantine:
    """Remembers the latest of such prompts, a bounded number, by account."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def check(self, request: TokenRequest) -> None:
        """Raise Quarantined if that prompt of that account is shut out."""
        while self._until and next(iter(self._until.values()))[0] <= self._clock():
            self._until.popitem(last=False)
        if self._until and not request.is_probe and (found := self._until.get(_key(request))):
            raise Quarantined(found[1])

    def put(self, request: TokenRequest) -> Quarantined:
        """Shut a prompt out, unless it is a probe's; return the error that says so."""
        error = Quarantined(
            f"the request was running on three workers as each of them died; it is quarantined: this prompt is "
            f"refused for {_SECONDS / 60:g} minutes; change it, or have an operator look at the workers' logs"
        )
        log.error("request_quarantined", request_id=request.request_id, account=request.account)
        if not request.is_probe:
            key = _key(request)
            self._until[key] = (self._clock() + _SECONDS, error.message)
            self._until.move_to_end(key)
            if len(self._until) > _MAX_PROMPTS:
                self._until.popitem(last=False)
        return error


def _key(request: TokenRequest) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (request.account.encode(), request.model_id.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(array("I", request.token_ids).tobytes())
    return digest.digest()

"""Refuses requests that would not be let in in time: before they are tokenized, if possible before they are parsed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from control_plane.accounts.identity import Caller
from control_plane.admission.service_classes import ServiceClass, class_of
from control_plane.generation import ModelCatalog, ModelDescription
from control_plane.text.model_name import model_named_in
from control_plane.text.prepared import Asked, PreparedPrompt, TextJob
from control_plane.text.request import session_key
from tandem_runtime.errors import TandemError

_GENERATING = ("chat", "completions", "run", "binding")
"""Endpoints whose requests wait for decode workers, if their model writes text."""


class Door(Protocol):
    """Decides on requests whose bodies are not tokenized yet."""

    @property
    def is_crowded(self) -> bool:
        """Whether requests wait, of whichever model."""

    def refuse_early(self, model_id: str, account: str, service_class: int, session: str, num_bytes: int) -> None:
        """Raise Overloaded if a request would not be let in in time."""

    def body_prepared(self, model_id: str, num_bytes: int, num_tokens: int) -> None:
        """A body of so many bytes has so many tokens."""


class EarlyRefusals:
    """Asks the door, twice if need be: by the name in the raw body, and by what the parsed body asks for.

    Neither the account's limits nor the ledger have had any work then; a body that is refused unparsed has no
    explanation either.
    """

    def __init__(self, door: Door | None, catalog: ModelCatalog, priority_accounts: Collection[str]) -> None:
        """`door`: None: nobody is refused here. `priority_accounts`: see `class_of`."""
        self._door = door
        self._catalog = catalog
        self._priority_accounts = priority_accounts

    def class_of(self, asked: Asked, caller: Caller) -> ServiceClass:
        """Return the class of a request: its body's, else its header's."""
        return class_of(asked.service_tier or caller.service_tier, caller.account, self._priority_accounts)

    async def check_unparsed(self, job: TextJob, raw: bytes, caller: Caller) -> None:
        """Raise Overloaded for a body that names a crowded model; a body that only parsing can tell of passes."""
        if self._door is None or not self._door.is_crowded or job.endpoint not in _GENERATING:
            return
        name = job.model or model_named_in(raw)
        if not name:
            return
        try:
            model = await self._catalog.get(name)
        except TandemError:
            return  # the request is refused for that, and recorded
        if model.encoder is None:
            service_class = class_of(caller.service_tier, caller.account, self._priority_accounts)
            session = session_key(caller.account, model.model_id, caller.session_affinity)
            self._door.refuse_early(model.model_id, caller.account, service_class, session, len(raw))

    def check_parsed(self, asked: Asked, model: ModelDescription, caller: Caller, num_bytes: int) -> None:
        """Raise Overloaded for a request of a crowded model."""
        if self._door is None or model.encoder is not None:
            return
        session = session_key(caller.account, model.model_id, caller.session_affinity or asked.session)
        self._door.refuse_early(model.model_id, caller.account, self.class_of(asked, caller), session, num_bytes)

    def prepared(self, model: ModelDescription, num_bytes: int, prompts: Sequence[PreparedPrompt]) -> None:
        """Learn how long a body's prompt is; a body of several tells nothing."""
        if self._door is not None and len(prompts) == 1:
            self._door.body_prepared(model.model_id, num_bytes, len(prompts[0].token_ids) // 4)

"""What would not be let in in time is refused before the tokenizer, the limits and the ledger have had any work."""

from __future__ import annotations

import pytest

from control_plane.text.text_service import InlinePreparer
from tandem_runtime.errors import Overloaded
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class ClosedDoor:
    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.asked: list[tuple[str, str, int, int]] = []
        self.prepared: list[tuple[str, int, int]] = []

    def refuse_early(self, model_id: str, account: str, service_class: int, session: str, num_bytes: int) -> None:
        self.asked.append((model_id, account, service_class, num_bytes))
        if not self.is_open:
            raise Overloaded("7 requests wait for demo", retry_after_seconds=6.4)

    def body_prepared(self, model_id: str, num_bytes: int, num_tokens: int) -> None:
        self.prepared.append((model_id, num_bytes, num_tokens))


async def test_a_refused_body_is_not_tokenized_and_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers: list[str] = []
    original = InlinePreparer.prepare

    async def counted(self: InlinePreparer, *arguments: object, **options: object) -> object:
        found = await original(self, *arguments, **options)  # type: ignore[arg-type]
        tokenizers.append("prepared")
        return found

    monkeypatch.setattr(InlinePreparer, "prepare", counted)
    door = ClosedDoor()
    async with serve(ScriptedDispatcher(Script(HELLO)), door=door) as gateway:
        response = await gateway.client.post("/v1/chat/completions", json={**CHAT, "service_tier": "flex"})
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert "x-should-retry" not in response.headers
        model_id, account, service_class, num_bytes = door.asked[0]
        assert (account, service_class, num_bytes) == ("default", -1, len(response.request.content))
        assert not gateway.dispatcher.requests and not tokenizers
        door.is_open = True
        assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        ((prepared_model, prepared_bytes, num_tokens),) = door.prepared
        assert prepared_model == model_id and prepared_bytes > num_tokens > 0
        assert num_tokens == len(gateway.dispatcher.requests[0].token_ids)

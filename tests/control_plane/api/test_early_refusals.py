"""What would not be let in in time is refused before the tokenizer, the limits and the ledger have had any work."""

from __future__ import annotations

import pytest

from control_plane.api.http import sse
from control_plane.text.model_name import model_named_in
from control_plane.text.text_service import InlinePreparer
from tandem_runtime.errors import Overloaded
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class ClosedDoor:
    def __init__(self, *, is_open: bool = False, knows_names: bool = False) -> None:
        """`knows_names`: it is asked before bodies are parsed."""
        self.is_open, self.knows_names = is_open, knows_names
        self.asked: list[tuple[str, str, int, int]] = []
        self.prepared: list[tuple[str, int, int]] = []

    @property
    def is_crowded(self) -> bool:
        return self.knows_names

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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "demo", "prompt": "hi"}),
        ("/client/v4/accounts/default/ai/run/demo", {"prompt": "hi"}),
    ],
)
async def test_a_body_whose_model_is_known_by_its_name_is_not_even_parsed_and_has_no_task(
    path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: InlinePreparer, *arguments: object, **options: object) -> object:
        raise AssertionError("it was parsed")

    watched: list[object] = []

    async def noted(request: object) -> None:
        watched.append(request)

    monkeypatch.setattr(InlinePreparer, "prepare", never)
    monkeypatch.setattr(sse, "_disconnected", noted)
    async with serve(ScriptedDispatcher(Script(HELLO)), door=ClosedDoor(knows_names=True)) as gateway:
        response = await gateway.client.post(path, json=body, headers={"x-service-tier": "flex"})
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert not watched, "a task was started for it"


async def test_an_open_door_and_a_name_that_nobody_has_change_nothing() -> None:
    door = ClosedDoor(is_open=True, knows_names=True)
    async with serve(ScriptedDispatcher(Script(HELLO)), door=door) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert len(door.asked) == 2, "before and after it was parsed"
        unknown = await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "nobody"})
        assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"model": "@cf/a", "messages": []}', "@cf/a"),
        (b'{"messages":[{"content":"say \\"model\\": \\"b\\""}],"model" :\t"a"}', "a"),
        (b'{"model": "a\\u0062\\"c"}', 'ab"c'),
        (b'{"model": "a", "metadata": {"model": "b"}}', None),
        (b'{"model": "a", "service_tier": "flex"}', None),
        (b'{"model": 7}', None),
        (b'{"model": "a\\x"}', None),
        (b"not json", None),
        (b'{"model": "a"' + b" " * 65_536 + b"}", None),
    ],
)
def test_a_models_name_is_found_without_parsing(raw: bytes, name: str | None) -> None:
    assert model_named_in(raw) == name

"""A request says which class it belongs to, in its body or in a header."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.admission.service_classes import ServiceClass
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
RUN = "/client/v4/accounts/me/ai/run/demo"
ASKED: list[tuple[str, dict[str, Any], dict[str, str], ServiceClass]] = [
    ("/v1/chat/completions", CHAT, {}, ServiceClass.DEFAULT),
    ("/v1/chat/completions", {**CHAT, "service_tier": "auto"}, {}, ServiceClass.DEFAULT),
    ("/v1/chat/completions", {**CHAT, "service_tier": "flex"}, {}, ServiceClass.BATCH),
    ("/v1/chat/completions", {**CHAT, "service_tier": "priority"}, {"x-service-tier": "flex"}, ServiceClass.PRIORITY),
    (RUN, {"prompt": "hi"}, {"x-service-tier": "batch"}, ServiceClass.BATCH),
    (RUN, {"prompt": "hi", "service_tier": "flex"}, {}, ServiceClass.BATCH),
    (RUN, {"prompt": "hi"}, {}, ServiceClass.DEFAULT),
]


@pytest.mark.parametrize(("path", "body", "headers", "service_class"), ASKED)
async def test_a_request_is_of_the_class_that_it_asks_for(
    path: str, body: dict[str, Any], headers: dict[str, str], service_class: ServiceClass
) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), priority_accounts=("*",)) as gateway:
        assert (await gateway.client.post(path, json=body, headers=headers)).status_code == 200
        assert gateway.dispatcher.requests[0].priority == service_class


async def test_who_may_not_have_priority_is_served_as_others_are() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO)), priority_accounts=("another",)) as gateway:
        body = {**CHAT, "service_tier": "priority"}
        assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert gateway.dispatcher.requests[0].priority == ServiceClass.DEFAULT


async def test_an_unknown_class_in_the_header_is_refused_by_name() -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        response = await gateway.client.post(RUN, json={"prompt": "hi"}, headers={"x-service-tier": "gold"})
        assert response.status_code == 400
        assert "x-service-tier must be one of default, batch, flex, priority" in response.text

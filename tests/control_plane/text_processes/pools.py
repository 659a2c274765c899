"""Pools of real text processes for tests, and what is sent through them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from control_plane.generation import ModelDescription
from control_plane.text.prepared import Asked, Endpoint, PreparedBody, TextJob
from control_plane.text.text_service import Resolve
from control_plane.text_processes.bodies import parse
from control_plane.text_processes.pool import TextLimits, TextProcesses
from tests.control_plane.api.model import CHATML, OneModel, description

HOSTILE = (
    "{% if messages[0].content == 'spin' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'grow' %}{{ messages[0].content * 900000000 }}{% endif %}"
) + CHATML
"""A template with which some messages take all time or memory there is."""


def model(**changes: object) -> ModelDescription:
    return description(**{"chat_template": HOSTILE, **changes})


def chat_body(content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    return msgspec.json.encode({"model": "demo", "messages": messages, "seed": 1, **fields})


def resolved_as(model: ModelDescription) -> Resolve:
    async def resolve(asked: Asked) -> ModelDescription:
        return await OneModel(model).get(asked.model)

    return resolve


@asynccontextmanager
async def pool(limits: TextLimits | None = None) -> AsyncIterator[TextProcesses]:
    processes = TextProcesses(limits)
    processes.start()
    try:
        yield processes
    finally:
        await processes.close()


async def prepare(
    processes: TextProcesses,
    raw: bytes,
    *,
    endpoint: Endpoint = "chat",
    account: str = "me",
    resolve: Resolve | None = None,
) -> PreparedBody:
    body, _ = await processes.prepare(TextJob(endpoint), raw, account, parse, resolve or resolved_as(model()))
    return body


def padded(raw: bytes, num_bytes: int) -> bytes:
    """Return a body of this length, which makes it one of the large lane."""
    return raw + b" " * (num_bytes - len(raw))

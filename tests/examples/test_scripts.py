"""Tests that the example programs run unchanged against a gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.tandem_client.serving import serve
from tests.tandem_client.stub_gateway import stub_gateway

ROOT = Path(__file__).parents[2]


def output_of(script: str, url: str) -> str:
    environment = os.environ | {"TANDEM_BASE_URL": url, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, str(ROOT / "examples" / script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_python_client_prints_the_answer() -> None:
    with stub_gateway() as gateway:
        assert output_of("python_client.py", gateway.url) == "One two three\n"


def test_the_openai_client_prints_the_answer() -> None:
    pytest.importorskip("openai", reason="the openai package is not installed (extra `dev`)")

    async def chunks() -> AsyncIterator[str]:
        for token in ("One", " two"):
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            yield f"data: {json.dumps(chunk | {'choices': [{'index': 0, 'delta': {'content': token}}]})}\n\n"
        yield "data: [DONE]\n\n"

    async def complete(request: Request) -> Response:
        return StreamingResponse(chunks(), media_type="text/event-stream")

    with serve(Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])) as url:
        assert output_of("openai_client.py", url) == "One two\n"

"""Tests what `tandem dev` prints of the gateway, and its refusals before it starts a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tandem_client.cli.dev import CannotRun, DevOptions, dev, gateway_state
from tandem_client.connection import Connection
from tests.tandem_client.serving import serve


def models(*names: str) -> Response:
    return JSONResponse({"data": [{"id": name} for name in names]})


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (models("@tandem/demo"), "@tandem/demo"),
        (models("a", "b", "c", "d", "e"), "a, b, c and 2 more"),
        (models(), "has no model loaded yet"),
        (Response(status_code=401), "requires a token: set TANDEM_TOKEN"),
        (PlainTextResponse("It works!"), "answers, but is not Tandem; check --gateway"),
        (Response(status_code=404), "answers, but is not Tandem; check --gateway"),
    ],
)
def test_what_answers_is_told_beside_the_gateway(answer: Response, wanted: str) -> None:
    tokens: list[str | None] = []

    async def respond(request: Request) -> Response:
        tokens.append(request.headers.get("authorization"))
        return answer

    with serve(Starlette(routes=[Route("/v1/models", respond)])) as url:
        assert gateway_state(Connection(url, "tdm_1", "default")) == wanted
    assert tokens == ["Bearer tdm_1"]


def refusal(folder: Path) -> str:
    with pytest.raises(CannotRun) as refused:
        dev(DevOptions(folder, Connection("http://127.0.0.1:9", None, "default")))
    return str(refused.value)


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none of wrangler.json, wrangler.jsonc, wrangler.toml" in refusal(tmp_path)
    (tmp_path / "wrangler.toml").touch()
    assert refusal(tmp_path) == f"wrangler is not installed; run: npm install --save-dev wrangler   (in {tmp_path})"
    package = tmp_path / "node_modules" / "wrangler" / "package.json"
    package.parent.mkdir(parents=True)
    package.write_text(json.dumps({"version": "4.85.1"}))
    assert "wrangler 4.85.1 is too old, tandem dev needs 4.86 or newer; run: npm install" in refusal(tmp_path)
    package.write_text(json.dumps({"version": "5.0.0"}))
    monkeypatch.setenv("PATH", "")
    assert "Node.js is not installed" in refusal(tmp_path)

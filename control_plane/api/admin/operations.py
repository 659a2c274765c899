"""Endpoints for operators: the landing page, liveness, readiness and the list of workers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from control_plane.api.http.request_context import Readiness, served_models, services_of
from control_plane.storage.database import Database


def routes() -> list[Route]:
    return [
        Route("/", landing, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/health", readyz, methods=["GET"]),
        Route("/ping", readyz, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/v1/workers", workers, methods=["GET"]),
    ]


async def healthz(request: Request) -> Response:
    """Answer 200: the process is alive. It may still be unable to serve."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Answer 200 only if a recent request has passed prefill, hand-over and decode, else 503.

    Models, ages and reasons are for the operator: only a token that opens GET /v1/workers shows them. Load generators
    and SageMaker ask /health and /ping before they begin: other servers answer there once they have loaded a model.
    """
    is_ready, details = await services_of(request).readiness.check()
    shown = details if getattr(request.state, "may_see_workers", False) else {}
    return JSONResponse({**shown, "ready": is_ready}, status_code=200 if is_ready else 503)


async def version(request: Request) -> Response:
    """Answer the version of the installed package."""
    return JSONResponse({"version": importlib.metadata.version("tandem-serve")})


async def workers(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": services_of(request).fleet.workers()})


async def landing(request: Request) -> Response:
    return HTMLResponse(landing_page(str(request.base_url).rstrip("/"), served_models(request)))


@dataclass(frozen=True)
class ReadyWithDatabase:
    """Readiness of the gateway and its database. The heartbeat of the accounts keeps `database.problem` current."""

    others: Readiness
    database: Database

    async def check(self) -> tuple[bool, dict[str, Any]]:
        is_ready, details = await self.others.check()
        if not self.database.problem:
            return is_ready, details
        return False, {**details, "ready": False, "reason": "the database cannot be used"}


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tandem</title>
<style>
  :root {{ color-scheme: light dark; --ink: light-dark(#1c1b1a, #ece9e4); --soft: light-dark(#6d6862, #a39d94);
          --paper: light-dark(#faf8f5, #171614); --card: light-dark(#fff, #211f1c);
          --line: light-dark(#e6e1d9, #35322d); --accent: light-dark(#b4481e, #f0905f); }}
  body {{ margin: 0; background: var(--paper); color: var(--ink);
         font: 17px/1.6 ui-sans-serif, system-ui, sans-serif; }}
  main {{ max-width: 44rem; margin: 12vh auto; padding: 0 1.5rem; }}
  h1 {{ font-size: 2.6rem; letter-spacing: -.03em; margin: 0; }} h1 span {{ color: var(--accent); }}
  p {{ color: var(--soft); margin: .6rem 0 2rem; }}
  pre {{ background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.1rem 1.3rem;
        overflow-x: auto; font: 14px/1.6 ui-monospace, monospace; }}
  nav a {{ color: var(--accent); text-decoration: none; margin-right: 1.4rem; }}
  nav a:hover {{ text-decoration: underline; }}
  table {{ margin-top: 2.4rem; border-collapse: collapse; font-size: 15px; }}
  td {{ padding: .45rem 1.6rem .45rem 0; border-top: 1px solid var(--line); vertical-align: top; color: var(--soft); }}
  td code {{ color: var(--ink); font: 14px/1.6 ui-monospace, monospace; white-space: nowrap; }}
</style>
<main>
  <h1>Tandem<span>.</span></h1>
  <p>Language models with prefill and decode on separate machines, behind <code>env.AI.run()</code>,
     Workers AI's REST and OpenAI's API. {serving}</p>
  <pre>curl -N {url}/client/v4/accounts/default/ai/run/{model} \\
  -d '{{"prompt": "What is a KV cache?", "stream": true}}'</pre>
  <nav><a href="/docs">reference</a><a href="/v1/models">models</a><a href="/v1/workers">workers</a>
    <a href="/readyz">readiness</a></nav>
  <table>
    <tr><td><code>POST /client/v4/accounts/&#123;account&#125;/ai/run/&#123;model&#125;</code></td>
      <td>Workers AI's REST</td></tr>
    <tr><td><code>POST /run</code></td><td>the <code>env.AI</code> binding, as workerd calls it</td></tr>
    <tr><td><code>POST /v1/chat/completions</code>, <code>/v1/completions</code></td><td>OpenAI's API</td></tr>
    <tr><td><code>GET /v1/workers</code>, <code>/readyz</code>, <code>/healthz</code></td>
      <td>for operators</td></tr>
  </table>
</main>
</html>
"""


def landing_page(url: str, models: Sequence[str]) -> str:
    """Return the landing page: what Tandem is, which models it serves, and a curl command."""
    names = ", ".join(f"<b>{escape(model)}</b>" for model in models)
    serving = f"Serving {names}." if models else "No model is being served yet."
    return _PAGE.format(url=escape(url), model=escape(models[0] if models else "@tandem/demo"), serving=serving)

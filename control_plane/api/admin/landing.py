"""What does somebody see who opens the address in a browser?"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
    <tr><td><code>POST /run</code></td><td>the <code>env.AI</code> binding, as workerd speaks it</td></tr>
    <tr><td><code>POST /v1/chat/completions</code>, <code>/v1/completions</code></td><td>OpenAI's API</td></tr>
    <tr><td><code>GET /v1/workers</code>, <code>/readyz</code>, <code>/healthz</code></td>
      <td>for those who run it</td></tr>
  </table>
</main>
</html>
"""


def landing_page(url: str, models: Sequence[str]) -> str:
    """Return the page: what this is, what it serves, a line to paste."""
    names = ", ".join(f"<b>{escape(model)}</b>" for model in models)
    serving = f"Serving {names}." if models else "No model is being served yet."
    return _PAGE.format(url=escape(url), model=escape(models[0] if models else "@tandem/demo"), serving=serving)

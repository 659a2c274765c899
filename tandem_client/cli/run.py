"""`tandem run`: sends one prompt and prints the answer."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from tandem_client import AI, TandemAPIError, TokenStream
from tandem_client.cli.chat_view import visible


@dataclass(frozen=True)
class RunOptions:
    """The flags of `tandem run`; None leaves the choice to the server."""

    prompt: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    raw: bool = False
    stream: bool = True
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise ValueError("--raw sends the prompt without a chat template, so it cannot be combined with --system")

    def inputs(self) -> dict[str, Any]:
        """Return the body of the call."""
        chosen = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        if self.stream and not self.as_json:
            options["stream"] = True
        if self.raw:
            options["raw"] = True
        if self.system is None:
            return {"prompt": self.prompt, **options}
        roles = (("system", self.system), ("user", self.prompt))
        return {"messages": [{"role": role, "content": content} for role, content in roles], **options}


def run(ai: AI, options: RunOptions, out: TextIO) -> None:
    """Run the prompt and write the answer to `out`. Raises TandemAPIError."""
    answer = ai.run(options.model or default_model(ai), options.inputs())
    if isinstance(answer, TokenStream):
        _write_stream(answer, out)
    elif options.as_json:
        out.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")
    else:
        _end_line(_shown(answer_text(answer), out), out)


def default_model(ai: AI) -> str:
    """Return the first model served. Raises TandemAPIError if there is none yet."""
    models = ai.models()
    if not models:
        raise TandemAPIError(None, 0, f"{ai.base_url} serves no model yet; `tandem status` shows what loads")
    return models[0]


def answer_text(answer: dict[str, Any]) -> str:
    """Return the text of a native or an OpenAI answer."""
    if answer.get("choices"):
        choice = answer["choices"][0]
        return str(choice.get("text") or (choice.get("message") or {}).get("content") or "")
    response = answer.get("response", "")
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _write_stream(stream: TokenStream, out: TextIO) -> None:
    started, last = time.monotonic(), "\n"
    with stream:
        for piece in stream:
            out.write(_shown(piece, out))
            out.flush()
            last = piece
    if not last.endswith("\n"):
        out.write("\n")
    if out.isatty() and sys.stderr.isatty() and stream.usage:
        _write_usage(stream.usage, time.monotonic() - started)


def _write_usage(usage: dict[str, Any], seconds: float) -> None:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = f"{usage['prompt_tokens']} prompt tokens" + (f" ({cached} cached)" if cached else "")
    sys.stderr.write(f"\033[2m{prompt}, {usage['completion_tokens']} new in {seconds:.1f} s\033[0m\n")


def _shown(text: str, out: TextIO) -> str:
    """Return the text to write: unchanged for a file, without control characters for a terminal."""
    return visible(text) if out.isatty() else text


def _end_line(text: str, out: TextIO) -> None:
    out.write(text if text.endswith("\n") else text + "\n")

"""Waits until a gateway of this network serves both models, streams an answer, and embeds a text.

It runs with the standard library alone, inside a container.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from typing import Any

_URL = "http://127.0.0.1:8642"
_CHAT, _ENCODER = "@tandem/demo", "tiny-bert"
_SECONDS = 120.0


def main() -> None:
    _wait_until_served()
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = ""
    for line in _post("/v1/chat/completions", model=_CHAT, stream=True, messages=question):
        if line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            answer += "".join(choice["delta"].get("content") or "" for choice in choices)
    print("answer:", answer)
    embedded = json.load(_post("/v1/embeddings", model=_ENCODER, input="about caches"))
    print("vector:", len(embedded["data"][0]["embedding"]))


def _wait_until_served() -> None:
    deadline = time.monotonic() + _SECONDS
    seen: object = "nothing was asked"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{_URL}/v1/models", timeout=5) as answer:
                seen = {model["id"] for model in json.load(answer)["data"]}
        except OSError as error:
            seen = error
        if isinstance(seen, set) and seen >= {_CHAT, _ENCODER}:
            return
        threading.Event().wait(0.1)
    sys.exit(f"{_CHAT} and {_ENCODER} are not served after {_SECONDS:.0f} s: {seen}")


def _post(path: str, **body: object) -> Any:
    request = urllib.request.Request(f"{_URL}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


if __name__ == "__main__":
    main()

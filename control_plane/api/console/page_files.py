"""Serves the files of the live page from memory, under a path that names their content."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).resolve().parents[2] / "web"
INDEX = "index.html"

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
"""Of the page and its files: nothing comes from elsewhere, nothing is inline, no text becomes HTML, no other page
frames it."""

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_TEXT = "text/plain; charset=utf-8"
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"
_HASH_CHARACTERS = 16


@dataclass(frozen=True)
class PageFile:
    """A file's bytes, plain and compressed, and the headers that say what they are."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, media_type: str) -> PageFile:
        digest = hashlib.sha256(content).hexdigest()[:_HASH_CHARACTERS]
        return cls(content, gzip.compress(content, mtime=0), media_type, f'"{digest}"')

    def answer(self, request: Request, cache_control: str = _ASK_AGAIN) -> Response:
        """Return the file, or 304 if the client has it. `cache_control` says how long a browser may keep it."""
        headers = {**SECURITY_HEADERS, "etag": self.etag, "cache-control": cache_control, "vary": "accept-encoding"}
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.etag in known:
            return Response(status_code=304, headers=headers)
        headers["content-type"] = self.media_type
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(self.content, headers=headers)


class PageFiles:
    """The files of a folder, read once. All lie below `/ui/{version}/`, where `version` is a hash of all of them.

    So a browser keeps them for ever, and a new version of the gateway is a new path. A page that an older gateway sent
    gets this gateway's files, without leave to keep them.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        contents = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        self.index = contents.pop(INDEX).decode()
        """The page with its places for what the gateway knows."""
        self._files = {
            name: PageFile.of(content, _MEDIA_TYPES.get(Path(name).suffix, _TEXT)) for name, content in contents.items()
        }
        every = hashlib.sha256()
        for name, content in contents.items():
            every.update(f"{name}\0{len(content)}\0".encode() + content)
        self.version = every.hexdigest()[:_HASH_CHARACTERS]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def answer(self, request: Request, version: str, name: str) -> Response | None:
        """Return the file; None if there is none of that name."""
        found = self._files.get(name)
        if found is None:
            return None
        return found.answer(request, _FOR_EVER if version == self.version else _ASK_AGAIN)

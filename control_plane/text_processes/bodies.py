"""Parses the bodies of all endpoints that read or write text."""

from __future__ import annotations

from control_plane.api.encoders import embeddings, rerank
from control_plane.api.openai import bodies as openai
from control_plane.api.openai import tokenization
from control_plane.api.workers_ai import bodies as workers_ai
from control_plane.text.prepared import Parsed, TextJob


def parse(job: TextJob, raw: bytes) -> Parsed:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    if job.endpoint in ("tokenize", "detokenize"):
        return tokenization.parse(job, raw)
    if job.endpoint == "embeddings":
        return embeddings.parse(job, raw)
    if job.endpoint == "rerank":
        return rerank.parse(job, raw)
    return openai.parse(job, raw) if job.endpoint in ("chat", "completions") else workers_ai.parse(job, raw)

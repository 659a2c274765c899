"""Sends thousands of requests that the OpenAPI document allows, or almost allows, and checks the answers against it.

python -m tests.control_plane.api.generated_requests --cases 5000
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from control_plane.api.http.request_context import HttpSettings
from control_plane.api.openapi.operations import EVENTS
from control_plane.app import create_app
from control_plane.dispatch.submitter import sampling_to_proto
from control_plane.generation import ModelDescription, TokenRequest
from control_plane.text.text_service import TextService
from tests.control_plane.api.gateway import Fleet, Ready
from tests.control_plane.api.model import OneModel, description, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher, ScriptedStream
from tests.tandem_client.serving import serve

HELLO = [*ids_of("Hello world, 你好 😀"), 1]
WITHOUT_END = ("/v1/live",)
"""Streams that last as long as their reader; tests/web and tests/control_plane/live read them."""
RUN_URL = "https://workers-binding.ai/run?version=3"
EXCLUDED = ("positive_data_acceptance", "negative_data_rejection")
"""What fits the document may still be refused: an unknown model, a prompt too long, two fields that exclude each other;
and null is taken where the document, which is the stricter one, does not know the field."""


@dataclass
class Seen:
    """Requests by status, and streams by endpoint."""

    statuses: Counter[int] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)


class Dispatcher(ScriptedDispatcher):
    """Answers everything that could be sent to a worker; forgets what it was asked."""

    async def submit(self, request: TokenRequest) -> ScriptedStream:
        sampling_to_proto(request.sampling)
        self.requests.clear()
        self.streams.clear()
        return await super().submit(request)


class Models(OneModel):
    """One model of each wire format."""

    newer = description(model_id="@tandem/newer", aliases=("newer",), wire_format="openai")

    async def get(self, name: str) -> ModelDescription:
        return self.newer if name in ("newer", "@tandem/newer") else await super().get(name)

    def list(self) -> list[ModelDescription]:
        return [self.model, self.newer]


def run(num_cases: int, seed: int | None = None) -> Seen:
    """Send so many requests to a server with scripted workers; raises the first failure, made small."""
    models = Models(description())
    text = TextService(models, Dispatcher(Script(HELLO)))
    with serve(create_app(text, models, Fleet(), Ready(), HttpSettings(max_body_bytes=100_000))) as url:
        return send_all(url, num_cases, seed, models=("demo", "newer"))


def send_all(
    url: str, num_cases: int, seed: int | None, *, models: Sequence[str], max_tokens: int | None = None
) -> Seen:
    """Send so many requests to the server at `url`; raises the first failure.

    `models` are names that it serves. No answer is longer than `max_tokens`.
    """
    seen = Seen()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    checks = [check for check in CHECKS.get_all() if check.__name__ not in EXCLUDED]
    with requests.Session() as session:

        def send(case: Any, model: str, is_streamed: bool) -> None:
            _steer(case, model, is_streamed, max_tokens)
            response = case.call(session=session, timeout=60)
            seen.statuses[response.status_code] += 1
            case.validate_response(response, checks=checks)
            seen.streams[case.operation.label] += response.headers.get("content-type") == [EVENTS]

        test = settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            derandomize=seed is None,
            suppress_health_check=list(HealthCheck),
        )(hypothesis.given(_cases(schema), st.sampled_from([*models, ""]), st.booleans())(send))
        (test if seed is None else hypothesis.seed(seed)(test))()
    return seen


def _cases(schema: Any) -> st.SearchStrategy[Any]:
    """Return requests to every endpoint, those with a body four times as often, right and wrong ones."""
    described = [result.ok() for result in schema.get_all_operations()]
    operations = [each for each in described if each.path not in WITHOUT_END]
    weighted = [each for each in operations for _ in range(4 if each.method == "post" else 1)]
    modes = (GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return st.one_of([each.as_strategy(generation_mode=mode) for each in weighted for mode in modes])


def _steer(case: Any, model: str, is_streamed: bool, max_tokens: int | None) -> None:
    """Let a case ask for a model that is served ("": for what it says), and for a stream: few would by chance."""
    inputs = [place for place in (case.body, *_inner(case.body)) if isinstance(place, dict)]
    if model:
        for place in (case.path_parameters, case.headers, case.query, *inputs):
            for name, value in (("model", model), ("cf-consn-model-id", model), ("X-Forwarded", RUN_URL)):
                if hasattr(place, "get") and isinstance(place.get(name), str):
                    place[name] = value
    for place in inputs:
        if "prompt" in place or "messages" in place:
            place |= {"stream": True} if is_streamed else {}
            place |= {"max_tokens": max_tokens} if max_tokens is not None else {}


def _inner(body: Any) -> list[Any]:
    return [body.get("inputs"), body.get("input")] if isinstance(body, dict) else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seen = run(arguments.cases, arguments.seed)
    by_status = dict(sorted(seen.statuses.items()))
    print(f"{seen.statuses.total():,} requests, by status: {by_status}; {seen.streams.total():,} streams")

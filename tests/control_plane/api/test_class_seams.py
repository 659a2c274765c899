"""An answer that crosses numerics classes has its seams and the fingerprint of each class; others are as ever.

Real dispatcher, text service and HTTP over two stand-in workers. Either worker may get the request first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from control_plane.accounts.identity import Caller
from control_plane.api.answer_classes import AnswerClasses, system_fingerprint
from control_plane.generation import ModelDescription
from control_plane.text.request import CompletionRequest, GenerationOptions
from control_plane.text.text_service import TextService
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import OneModel, description, ids_of
from tests.control_plane.harness import harness
from tests.control_plane.scripted_worker import FINGERPRINT, MODEL, AttachStream, ScriptedWorker
from tests.tandem_worker.kv_harness import until

HELLO = [*ids_of("Hello world, how are you today?"), 1]
AT = 4
"""Tokens of an answer before it moves."""
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
RUN = f"/client/v4/accounts/me/ai/run/{MODEL}"
WANTED = {"x-tandem-explain": "1"}
ONE, OTHER = "cpu/float32/lean", "cuda/bfloat16/lean"


def model(numerics_class: str = ONE, **changes: object) -> dict[str, Any]:
    return {"model_id": MODEL, "fingerprint": FINGERPRINT.hex(), "numerics_class": numerics_class, **changes}


def fingerprint_of(numerics_class: str) -> str:
    return system_fingerprint(description(**model(numerics_class)))


async def hello(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    """Fail an answer that begins here at `AT`; send the rest of an answer that goes on here."""
    attach.accept(submit)
    place = len(submit.token_ids) - submit.num_prompt_tokens
    if place == 0:
        attach.tokens(submit, len(submit.token_ids), HELLO[:AT])
        attach.fail(submit, Unavailable("its engine died"))
        return
    end: dict[str, Any] = {"finish_reason": pb.FINISH_REASON_STOP, "ledger": pb.PhaseLedger()}
    attach.tokens(submit, len(submit.token_ids), HELLO[place:], **end)


class Answers:
    """A gateway over two workers."""

    def __init__(self, gateway: Gateway, workers: list[ScriptedWorker]) -> None:
        self.gateway = gateway
        self.workers = workers

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        answer = await self.gateway.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def events(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
        answer = await self.gateway.client.post(path, json={**body, "stream": True}, headers=headers)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
        return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]

    def moved(self) -> tuple[str, str]:
        """Return the fingerprints of the classes that the last request went from and to."""
        last = [(worker.submits[-1], worker) for worker in self.workers if worker.submits]
        last.sort(key=lambda each: each[0].attempt)
        return fingerprint_of(last[-2][1].numerics_class), fingerprint_of(last[-1][1].numerics_class)

    def seams(self, choice: int = 0) -> list[dict[str, Any]]:
        before, after = self.moved()
        return [{"choice": choice, "position": AT, "from": before, "to": after}]


@asynccontextmanager
async def answers(first: str = ONE, second: str = OTHER, **changes: object) -> AsyncIterator[Answers]:
    workers = [ScriptedWorker("a", behave=hello, numerics_class=first)]
    workers += [ScriptedWorker("b", behave=hello, numerics_class=second)]
    async with harness(*workers) as here, serve(here.dispatcher, **model(**changes)) as gateway:  # type: ignore[arg-type]
        yield Answers(gateway, workers)


async def test_a_whole_answer_has_its_seams() -> None:
    async with answers() as here:
        chat = await here.post("/v1/chat/completions", CHAT)
        assert chat["choices"][0]["message"]["content"] == "Hello world, how are you today?"
        assert chat["tandem"] == {"seams": here.seams()}
        assert chat["system_fingerprint"] == here.moved()[0], "the class that begins the answer"
        completion = await here.post("/v1/completions", {"model": MODEL, "prompt": "hi"})
        assert completion["tandem"] == {"seams": here.seams()}
        native = (await here.post(RUN, {"prompt": "hi"}))["result"]
        assert native["seams"] == here.seams() and list(native)[-2:] == ["usage", "seams"]


async def test_an_explanation_and_seams_share_the_field() -> None:
    async with answers() as here:
        chat = await here.post("/v1/chat/completions", CHAT, WANTED)
        assert chat["tandem"]["seams"] == here.seams()
        explained = chat["tandem"]["explanation"]
        (move,) = explained["moves"]
        assert (move["kind"], explained["usage"]["seams"]) == ("migration", 1)
        assert move["seam"]["position"] == AT
        assert {move["seam"]["from_class"], move["seam"]["to_class"]} == {ONE, OTHER}


@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_chunks_have_the_fingerprint_of_their_class_and_the_last_event_the_seams(
    path: str, options: dict[str, Any]
) -> None:
    body = CHAT if "chat" in path else {"model": MODEL, "prompt": "hi"}
    async with answers() as here:
        events = await here.events(path, {**body, **({"stream_options": options} if options else {})}, WANTED)
        before, after = here.moved()
        explanation = events.pop()
        assert [event.get("tandem") for event in events] == [None] * (len(events) - 1) + [{"seams": here.seams()}]
        assert "server_timing" in events[-1]
        assert list(explanation["tandem"]) == ["explanation"], "seams are in the last ordinary event"
        texts = [event for event in events if event["choices"] and text_of(event["choices"][0])]
        assert "".join(text_of(event["choices"][0]) for event in texts) == "Hello world, how are you today?"
        assert [event["system_fingerprint"] for event in texts] == [before] * AT + [after] * (len(HELLO) - AT - 1)
        assert [event["system_fingerprint"] for event in events[-2:]] == [after] * 2


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("wire_format", ["native", "openai"])
async def test_answers_of_workers_ai_have_the_seams_beside_the_usage(wire_format: str) -> None:
    async with answers(wire_format=wire_format) as here:
        events = await here.events(RUN, {"prompt": "hi"})
        assert [event.get("seams") for event in events] == [None] * (len(events) - 1) + [here.seams()]
        assert events[-1]["usage"]["completion_tokens"] == len(HELLO) and "tandem" not in events[-1]
        if wire_format == "openai":
            found = [event["system_fingerprint"] for event in events[:-1] if event["choices"]]
            assert [found.count(each) for each in here.moved()] == [AT, len(HELLO) - AT]
        whole = (await here.post(RUN, {"prompt": "hi"}))["result"]
        assert whole["seams"] == here.seams() and "tandem" not in whole


async def test_choices_of_several_prompts_have_seams_with_the_numbers_of_the_answer() -> None:
    async with answers() as here:
        answer = await here.post("/v1/completions", {"model": MODEL, "prompt": ["one", "two"], "n": 2})
        seams = answer["tandem"]["seams"]
        assert [(seam["choice"], seam["position"]) for seam in seams] == [(index, AT) for index in range(4)]
        stream = await here.events("/v1/completions", {"model": MODEL, "prompt": ["one", "two"], "n": 2})
        seams = stream[-1]["tandem"]["seams"]
        assert [(seam["choice"], seam["position"]) for seam in seams] == [(index, AT) for index in range(4)]
        for index in range(4):
            found = [event for event in stream if event["choices"] and event["choices"][0]["index"] == index]
            prints = [event["system_fingerprint"] for event in found if text_of(event["choices"][0])]
            assert prints == [seams[index]["from"]] * AT + [seams[index]["to"]] * (len(HELLO) - AT - 1)


@pytest.mark.parametrize("wire_format", ["native", "openai"])
async def test_an_answer_that_stays_in_its_class_is_as_ever(wire_format: str) -> None:
    """A move within the class changes nothing either."""
    async with answers(ONE, ONE, wire_format=wire_format) as here:
        for path, body in (("/v1/chat/completions", CHAT), (RUN, {"prompt": "hi"})):
            whole, events = await here.post(path, body), await here.events(path, body)
            text = json.dumps([whole, events])
            assert "seams" not in text and "tandem" not in text
            prints = {event["system_fingerprint"] for event in events if "system_fingerprint" in event}
            assert prints <= {fingerprint_of(ONE)}
        explained = await here.post("/v1/chat/completions", CHAT, WANTED)
        explanation = explained["tandem"]["explanation"]
        assert list(explained["tandem"]) == ["explanation"]
        assert [move["seam"] for move in explanation["moves"]] == [None] and explanation["usage"]["seams"] == 0


async def test_an_answer_of_another_class_than_the_catalogues_names_its_own() -> None:
    async with answers(OTHER, OTHER) as here:
        whole = await here.post("/v1/chat/completions", CHAT)
        assert whole["system_fingerprint"] == fingerprint_of(OTHER) != fingerprint_of(ONE)
        events = await here.events("/v1/chat/completions", CHAT)
        assert {event["system_fingerprint"] for event in events} == {fingerprint_of(OTHER)}
        assert "tandem" not in whole and "tandem" not in events[-1]


async def test_a_batch_with_tokens_of_both_classes_is_marked_token_by_token() -> None:
    workers = [ScriptedWorker(name, behave=hello, numerics_class=each) for name, each in (("a", ONE), ("b", OTHER))]
    async with harness(*workers) as here:
        found: ModelDescription = description(**model())
        service = TextService(OneModel(found), here.dispatcher)
        request = CompletionRequest(MODEL, tuple(range(40)), Caller("r"), GenerationOptions(max_tokens=60))
        stream = await service.start(request)
        classes = AnswerClasses(stream)
        await until(lambda: len(stream.histories[0].choices[0].tokens) == len(HELLO))
        marks: list[str] = []
        num_batches = 0
        async for batch in stream.batches():
            num_batches += 1
            assert classes.is_mixed
            for _ in classes.marked(batch, marks.append):
                pass
        (seam,) = classes.seams
        assert num_batches == 1 and marks == [seam["from"]] * AT + [seam["to"]] * (len(HELLO) - AT)


async def test_openais_sdk_reads_an_answer_with_seams() -> None:
    async with (
        answers() as here,
        openai.AsyncOpenAI(base_url=f"{here.gateway.url}/v1", api_key="unused") as client,
    ):
        whole: Any = await client.chat.completions.create(**CHAT)
        assert whole.tandem["seams"] == here.seams()
        stream: Any = await client.chat.completions.create(**CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].tandem["seams"] == here.seams()

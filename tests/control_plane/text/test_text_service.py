"""A request becomes the right tokens, and tokens the right text, whatever ends the request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from control_plane.accounts.identity import Caller
from control_plane.text.choice import TextDelta
from control_plane.text.request import ChatRequest, CompletionRequest, GenerationOptions, choice_seed, session_key
from control_plane.text.text_service import TextService
from control_plane.text.text_stream import TextStream
from tandem_runtime.errors import ContextTooLong, DeadlineExceeded, InternalError, InvalidRequest, ModelNotFound
from tests.control_plane.api.model import OneModel, description, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

EOS = 1
CALLER = Caller("r1", account="me", session_affinity="ses", reject_if_busy=True)


def service(dispatcher: ScriptedDispatcher, **model_changes: object) -> TextService:
    return TextService(OneModel(description(**model_changes)), dispatcher)


def completion(prompt: str | tuple[int, ...] = "Hello", **options: Any) -> CompletionRequest:
    return CompletionRequest("demo", prompt, CALLER, GenerationOptions(**options))


async def read(stream: TextStream) -> list[TextDelta]:
    return [delta async for delta in stream]


async def answer(script: Script, **options: Any) -> tuple[str, str | None]:
    deltas = await read(await service(ScriptedDispatcher(script)).start(completion(**options)))
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason


async def test_a_request_reaches_the_dispatcher_with_everything_the_caller_said() -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    await service(dispatcher).start(completion(max_tokens=7, temperature=0.0, seed=5, stop_token_ids=(9,), top_k=3))
    (request,) = dispatcher.requests
    assert (request.model_id, request.account) == ("@tandem/demo", "me")
    assert request.session_affinity == session_key("me", "@tandem/demo", "ses")
    assert request.reject_if_busy and request.token_ids == (0, *ids_of("Hello"))
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.top_k) == (7, 0.0, 5, 3)
    assert sampling.stop_token_ids == (1, 3, 9)


async def test_what_the_caller_leaves_open_comes_from_the_model_then_from_the_endpoint() -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    text = service(dispatcher, generation_defaults={"temperature": 0.3})
    await text.start(completion(default_temperature=0.6, default_max_tokens=256))
    await service(dispatcher).start(completion(default_temperature=0.6))
    assert [request.sampling.temperature for request in dispatcher.requests] == [0.3, 0.6]
    assert [request.sampling.max_tokens for request in dispatcher.requests] == [256, 2048 - 1 - len(ids_of("Hello"))]


async def test_a_missing_seed_is_drawn_anew_for_each_request() -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    for _ in range(3):
        await service(dispatcher).start(completion())
    assert len({request.choice_seeds for request in dispatcher.requests}) == 3


async def test_choices_of_a_seeded_request_have_seeds_of_their_own_and_the_first_keeps_the_callers() -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    await service(dispatcher).start(completion(seed=42, num_choices=3))
    seeds = dispatcher.requests[0].choice_seeds
    assert seeds == (42, choice_seed(42, 1), choice_seed(42, 2)) and len(set(seeds)) == 3


async def test_text_is_the_tokens_without_the_stop_token() -> None:
    assert await answer(Script([*ids_of("Hello world, 你好 😀"), EOS])) == ("Hello world, 你好 😀", "stop")


async def test_eos_at_the_first_token_is_an_empty_answer() -> None:
    assert await answer(Script([EOS])) == ("", "stop")


async def test_max_tokens_one_gives_one_token_and_says_length() -> None:
    text, reason = await answer(Script(ids_of("Hello world")), max_tokens=1)
    assert text and reason == "length" and "Hello world".startswith(text)


async def test_half_a_character_at_the_end_leaves_as_a_replacement() -> None:
    emoji = ids_of("a😀")[:-1]
    assert await answer(Script(emoji, finish_reason="length")) == ("a\ufffd", "length")


async def test_a_stop_string_ends_its_choice_at_the_dispatcher_and_nothing_behind_it_leaves() -> None:
    words = ids_of("Once upon a time there was a small model that told stories.")
    dispatcher = ScriptedDispatcher(Script(choices={0: words, 1: [*ids_of("Hello"), EOS]}))
    deltas = await read(await service(dispatcher).start(completion(stop=("time",), num_choices=2)))
    texts = ["".join(delta.text for delta in deltas if delta.choice_index == index) for index in (0, 1)]
    assert texts == ["Once upon a ", "Hello"]
    assert dispatcher.last.stopped_choices == {0}
    assert dispatcher.last.usage.num_completion_tokens < len(words)


async def test_a_stop_string_in_the_very_first_token_gives_an_empty_answer() -> None:
    assert await answer(Script([*ids_of("Hello"), EOS]), stop=("H",)) == ("", "stop")


async def test_logprobs_leave_with_their_text_and_not_for_what_a_stop_string_cut() -> None:
    token_ids = ids_of("Hello world, how")
    dispatcher = ScriptedDispatcher(Script([*token_ids, EOS]))
    deltas = await read(await service(dispatcher).start(completion(num_logprobs=2, stop=(",",))))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.chosen.bytes for entry in entries) == b"Hello world"
    assert entries[0].text_offset == 0 and all(len(entry.top) == 2 for entry in entries)


async def test_logprobs_of_all_tokens_come_but_not_of_the_stop_token() -> None:
    token_ids = ids_of("Hello 😀")
    dispatcher = ScriptedDispatcher(Script([*token_ids, EOS], tokens_per_delta=3))
    deltas = await read(await service(dispatcher).start(completion(num_logprobs=0)))
    assert [entry.chosen.token_id for delta in deltas for entry in delta.logprobs] == token_ids


async def test_a_prompt_may_fill_the_context_and_not_one_token_more() -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    text = service(dispatcher, context_length=16)
    await text.start(completion(tuple(range(4, 20))))
    assert dispatcher.requests[-1].sampling.max_tokens == 1
    for length in (17, 18):
        with pytest.raises(ContextTooLong, match=rf"{length} tokens.*takes 16.*by at least {length - 16}"):
            await text.start(completion(tuple(range(4, 4 + length))))


async def test_max_tokens_beyond_the_context_is_cut_to_what_is_left() -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    await service(dispatcher, context_length=16).start(completion((4, 5, 6), max_tokens=500))
    assert dispatcher.requests[0].sampling.max_tokens == 13


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (completion(""), "prompt is empty"),
        (completion(()), "prompt is empty"),
        (completion((4, 99_999)), "token id 99999"),
        (completion(logit_bias={99_999: 1.0}), "logit_bias"),
        (completion(top_p=2.0), "top_p is 2.0"),
        (ChatRequest("demo", (), CALLER), "messages is empty"),
    ],
)
async def test_nonsense_never_reaches_a_worker(request_: CompletionRequest | ChatRequest, message: str) -> None:
    dispatcher = ScriptedDispatcher(Script([EOS]))
    with pytest.raises(InvalidRequest, match=message):
        await service(dispatcher).start(request_)
    assert dispatcher.requests == []


async def test_messages_need_a_chat_template() -> None:
    request = ChatRequest("demo", ({"role": "user", "content": "hi"},), CALLER)
    with pytest.raises(InvalidRequest, match="no chat template; send a prompt"):
        await service(ScriptedDispatcher(), chat_template="").start(request)


async def test_an_unknown_model_is_named_together_with_those_there_are() -> None:
    with pytest.raises(ModelNotFound, match=r"'other'.*@tandem/demo"):
        await service(ScriptedDispatcher()).start(replace(completion(), model="other"))


async def test_a_stream_that_dries_up_is_an_error_and_never_a_stop() -> None:
    dispatcher = ScriptedDispatcher(Script())
    stream = await service(dispatcher).start(completion())
    with pytest.raises(InternalError, match="ended before the answer"):
        await read(stream)
    assert dispatcher.last.closed.is_set()


async def test_the_deadline_ends_waiting_for_a_worker_and_waiting_for_tokens() -> None:
    caller = replace(CALLER, timeout_seconds=0.05)
    waiting = ScriptedDispatcher(Script([EOS], accept=asyncio.Event()))
    with pytest.raises(DeadlineExceeded, match=r"0\.05 seconds"):
        await service(waiting).start(replace(completion(), caller=caller))
    assert waiting.submit_cancelled.is_set()

    pausing = ScriptedDispatcher(Script([*ids_of("Hello"), EOS], pause_after=1))
    stream = await service(pausing).start(replace(completion(), caller=caller))
    with pytest.raises(DeadlineExceeded):
        await read(stream)
    assert pausing.last.closed.is_set()


async def test_closing_a_stream_twice_cancels_its_tokens_once_and_for_all() -> None:
    dispatcher = ScriptedDispatcher(Script(ids_of("Hello"), pause_after=1))
    stream = await service(dispatcher).start(completion())
    await stream.aclose()
    await stream.aclose()
    assert dispatcher.last.closed.is_set()


async def test_a_broken_tokenizer_file_is_the_models_fault_and_is_tried_again() -> None:
    text = service(ScriptedDispatcher(), tokenizer_json=b"{}")
    for _ in range(2):
        with pytest.raises(InternalError, match=r"tokenizer\.json of @tandem/demo"):
            await text.start(completion())

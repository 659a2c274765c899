"""A prompt is serialized once for each request, and sent once to each worker, not once for each choice."""

from __future__ import annotations

from control_plane.dispatch.block_hashes import wire_prompt
from control_plane.fleet.worker_links import _Submits
from control_plane.generation import TokenIds
from tandem.v1 import types_pb2 as pb
from tests.control_plane.harness import FULL, PROMPT, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import PREFILL, ScriptedWorker, refuse_with

LONG = TokenIds(range(130_000))
NUM_CHOICES = 8


async def test_the_choices_of_a_request_share_one_copy_of_the_prompt() -> None:
    decode, prefill = ScriptedWorker("d"), ScriptedWorker("p", PREFILL)
    async with harness(decode, prefill) as here:
        await tokens_of(await here.dispatcher.submit(new_request(request_id="before")))  # the hellos have come
        decode.submits.clear()
        num_before = decode.num_prompts_read, prefill.num_prompts_read
        stream = await here.dispatcher.submit(new_request(num_choices=NUM_CHOICES))
        assert await tokens_of(stream) == [answer()] * NUM_CHOICES
        assert (decode.num_prompts_read, prefill.num_prompts_read) == (num_before[0] + 1, num_before[1] + 1)
        first = decode.submits[0]
        assert list(first.token_ids) == list(PROMPT) and len(first.block_hashes) == 2
        for index, submit in enumerate(decode.submits):
            assert (submit.choice_index, submit.request_id[-2:]) == (index, f"-{index}")
            assert (submit.token_ids, submit.block_hashes) == (first.token_ids, first.block_hashes)
            assert submit.handle == first.handle and submit.sampling.max_tokens == first.sampling.max_tokens
        assert len({submit.sampling.seed for submit in decode.submits}) == NUM_CHOICES


async def test_choices_that_a_full_worker_refuses_go_to_the_next_one_with_one_prompt() -> None:
    full, free = ScriptedWorker("full", behave=refuse_with(FULL)), ScriptedWorker("other")
    async with harness(full, free) as here:
        await tokens_of(await here.dispatcher.submit(new_request(request_id="before")))  # the hellos have come
        assert (full.num_prompts_read, free.num_prompts_read) == (1, 1)
        here.report(full)  # it may have room again
        stream = await here.dispatcher.submit(new_request(num_choices=NUM_CHOICES))
        assert await tokens_of(stream) == [answer()] * NUM_CHOICES
        assert (full.num_prompts_read, free.num_prompts_read) == (2, 2)
        assert len(full.submits) == len(free.submits) == 1 + NUM_CHOICES


async def test_a_worker_that_does_not_take_choices_gets_whole_requests() -> None:
    decode = ScriptedWorker("d")
    decode.takes_choices = False
    async with harness(decode) as here:
        await tokens_of(await here.dispatcher.submit(new_request(request_id="before")))
        stream = await here.dispatcher.submit(new_request(num_choices=3))
        assert await tokens_of(stream) == [answer()] * 3
        assert decode.num_prompts_read == 1 + 3


def test_a_command_is_the_prompts_bytes_and_those_of_its_request() -> None:
    wire = wire_prompt(LONG, identity=b"f" * 16, grain=16, salt=b"salt", num_public_tokens=0)
    prompt = wire.token_ids + wire.block_hashes
    own = pb.Submit(request_id="r-1", num_prompt_tokens=len(LONG), token_ids=[5, 6], block_hashes=[b"h" * 16])
    (command,) = _Submits(prompt, [own]).commands(takes_choices=True)
    assert prompt in command  # as it came: nothing was parsed
    read = pb.Command.FromString(command).submit
    assert list(read.token_ids) == [*LONG, 5, 6] and (read.request_id, read.num_prompt_tokens) == ("r-1", len(LONG))
    assert len(read.block_hashes) == len(LONG) // 16 + 1 and read.block_hashes[-1] == b"h" * 16
    (command,) = _Submits(prompt, [own] * 3).commands(takes_choices=True)
    choices = pb.Command.FromString(command).choices
    assert choices.shared == pb.Submit.FromString(prompt) and list(choices.choices) == [own] * 3
    assert len(list(_Submits(prompt, [own] * 3).commands(takes_choices=False))) == 3

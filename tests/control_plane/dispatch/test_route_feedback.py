"""After a request, the router knows where the request's blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from control_plane.block_chain import BlockHashes
from control_plane.dispatch.block_hashes import PromptHashes, cache_salt, hash_prompt
from control_plane.dispatch.request_stream import RequestStream
from control_plane.dispatch.route_feedback import hand_over_ms
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.generation import NOTHING, CachePolicy
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.spaces import model_identity
from tests.control_plane.harness import PROMPT, SECRET, Harness, answer, harness, new_request, tokens_of
from tests.control_plane.scripted_worker import MODEL, PREFILL, AttachStream, ScriptedWorker, kv_load, kv_service

LONG = tuple(range(100))


def blocks_of(here: Harness, prompt: tuple[int, ...]) -> BlockHashes:
    """Return a prompt's block hashes for the tests' account."""
    hashes = hash_prompt(model_identity(here.card(MODEL).fingerprint), prompt, cache_salt(SECRET, "me"))
    return hashes.blocks


async def test_a_prompts_blocks_are_in_both_pools_and_in_prefills_host() -> None:
    prefill, decode = ScriptedWorker("p", PREFILL), ScriptedWorker("d")
    async with harness(prefill, decode) as here:
        await tokens_of(await here.dispatcher.submit(new_request()))
        (submit,) = prefill.submits
        assert len(submit.block_hashes) == 2
        match = here.router.prefixes.find(submit.block_hashes, decode.space)
        assert match.pools == {prefill.incarnation: 2, decode.incarnation: 2}
        assert match.hosts == {"host-a": 2}


async def test_the_blocks_of_an_answer_are_where_it_was_written() -> None:
    decode = ScriptedWorker("d")
    async with harness(decode) as here:
        stream: RequestStream = await here.dispatcher.submit(new_request(max_tokens=30))
        await tokens_of(stream)
        hashes = PromptHashes(decode.submits[0].hash_root, BlockHashes(b"".join(decode.submits[0].block_hashes)))
        whole = hashes.with_answer(PROMPT, answer(30))
        assert len(whole) == 4
        match = here.router.prefixes.find(whole, decode.space)
        assert (match.pools, match.hosts) == ({decode.incarnation: 4}, {"host-a": 4})
        again = await here.dispatcher.submit(new_request(request_id="again", token_ids=(*PROMPT, *answer(30), 5)))
        await tokens_of(again)
        assert again.route["cached_own_tokens"] == 64


async def test_the_prompt_of_many_choices_is_learnt_once_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices of a prompt of 370,000 tokens learnt it 128 times, and 128 times again in one callback at the end."""
    prefill, decode = ScriptedWorker("p", PREFILL), ScriptedWorker("d")
    async with harness(prefill, decode) as here:
        learnt: list[tuple[str, str, int, int]] = []
        learn = here.router.prefixes.learn

        def record(
            block_hashes: Sequence[bytes], incarnation: str, host_id: str, first: int, space: bytes, *, is_told: bool
        ) -> None:
            learnt.append((incarnation, host_id, first, len(block_hashes)))
            learn(block_hashes, incarnation, host_id, first, space, is_told=is_told)

        monkeypatch.setattr(here.router.prefixes, "learn", record)
        stream = await here.dispatcher.submit(new_request(max_tokens=30, num_choices=8, token_ids=LONG))
        await tokens_of(stream)
        assert sorted(lesson for lesson in learnt if lesson[2] == 0) == [
            (decode.incarnation, "", 0, 6),  # it has pulled the prompt
            (decode.incarnation, "", 0, 6),  # at the end, so that the prompt outlives its answers
            (prefill.incarnation, "host-a", 0, 6),
        ]
        answers = [lesson for lesson in learnt if lesson[2:] == (6, 2)]
        assert answers == [(decode.incarnation, "host-a", 6, 2)] * 8
        assert sum(num_blocks for *_, num_blocks in learnt) == 3 * 6 + 8 * 2


async def test_an_uncacheable_prompt_teaches_nothing() -> None:
    async with harness(ScriptedWorker("p", PREFILL), ScriptedWorker("d")) as here:
        await tokens_of(await here.dispatcher.submit(new_request(cache=NOTHING)))
        assert len(here.router.prefixes) == 0


async def test_the_router_learns_what_was_left_and_expects_what_may_be_found() -> None:
    async with harness(ScriptedWorker("p", PREFILL), ScriptedWorker("d")) as here:

        async def expected(name: str, cache: CachePolicy) -> tuple[int, int]:
            """Run a request; return how many tokens were expected in caches, and how many points are known then."""
            stream = await here.dispatcher.submit(new_request(request_id=name, max_tokens=30, cache=cache))
            await tokens_of(stream)
            return stream.route["cached_own_tokens"], len(here.router.prefixes)

        # 1. The prompt fills two blocks, with the answer four; sample points are the first, the second and the fourth.
        assert await expected("reads", CachePolicy.of("read")) == (0, 0)
        assert await expected("one block", CachePolicy.of("on", 20)) == (0, 1)
        assert await expected("writes", CachePolicy.of("write")) == (0, 3)
        # 2. By now all of them are known.
        assert await expected("reads again", CachePolicy.of("read")) == (32, 3)
        assert await expected("one block again", CachePolicy.of("on", 20)) == (16, 3)
        assert await expected("writes again", CachePolicy.of("write")) == (0, 3)


async def test_whoever_reads_the_prompt_is_told_which_other_host_may_have_it() -> None:
    prefill, decode = ScriptedWorker("p", PREFILL), ScriptedWorker("d")
    async with harness(prefill, decode) as here:
        here.registry.register(kv_service("kv-1", "127.0.0.1:2", "host-b"), kv_load())
        here.router.prefixes.learn(blocks_of(here, LONG), "elsewhere", "host-b", space=prefill.space)
        stream = await here.dispatcher.submit(new_request(token_ids=LONG))
        assert stream.route["prefix_source"] == "127.0.0.1:2"
        assert (prefill.submits[0].prefix_source, prefill.submits[0].prefix_source_id) == ("127.0.0.1:2", "kv-1")
        assert (decode.submits[0].prefix_source, decode.submits[0].prefix_source_id) == ("", "")
        assert prefill.submits[0].prefix_wait_ms == round(4 * stream.route["predicted_load_ms"]) > 0
        assert not decode.submits[0].HasField("prefix_wait_ms")
        await stream.aclose()


async def test_what_another_host_did_not_have_is_not_expected_there_again() -> None:
    async def find_two_blocks(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        ledger = pb.PhaseLedger(num_cached_tokens=32, num_loaded_tokens=32, num_computed_tokens=68)
        attach.tokens(submit, len(LONG), [1100], ledger=ledger)

    prefill, decode = ScriptedWorker("p", PREFILL, find_two_blocks), ScriptedWorker("d")
    async with harness(prefill, decode) as here:
        here.registry.register(kv_service("kv-1", "127.0.0.1:2", "host-b"), kv_load())
        here.router.prefixes.learn(blocks_of(here, LONG), "elsewhere", "host-b", space=prefill.space)
        await tokens_of(await here.dispatcher.submit(new_request(token_ids=LONG)))
        assert here.router.prefixes.find(blocks_of(here, LONG), prefill.space).hosts == {"host-a": 6, "host-b": 2}


async def test_what_ends_after_its_worker_has_gone_teaches_nothing() -> None:
    """Nobody would tell the index once more that the pool is gone: its number would be used up for good."""
    async with harness(ScriptedWorker("d")) as here:
        stream = await here.dispatcher.submit(new_request())
        await tokens_of(stream)
        call, feedback = stream.state.choices[0].call, here.dispatcher._feedback
        assert call is not None and here.router.prefixes.find(blocks_of(here, PROMPT), call.link.worker.space).pools
        here.registry.deregister("d", call.incarnation)
        here.router.prefixes.forget_pool(call.incarnation)  # as the reader of block events does
        ledger = pb.PhaseLedger(num_computed_tokens=len(PROMPT), scheduled_ns=1, first_token_ns=10**9)
        feedback.prompt_read(stream.state, call)
        feedback.ledger_received(stream.state, call, ledger)
        feedback.closed(stream.state)
        assert call.incarnation not in here.router.prefixes._table._pools
        assert here.router.costs.measured_rate(call.link.worker) is None


def a_call(sent_at: float, output_at: float, closed_at: float, **times: Any) -> WorkerCall:
    call = object.__new__(WorkerCall)
    call.sent_at, call.output_at, call.closed_at = sent_at, output_at, closed_at
    call.ledger = pb.PhaseLedger(**times)
    return call


MS = 1_000_000
HOUR = 3_600_000 * MS


def prefill_call(clock: int, output_at: float = 0.120) -> WorkerCall:
    """Sent at 0; each way takes 10 ms. The first token is made at 110 ms, by the gateway's clock."""
    return a_call(0.0, output_at, output_at, submitted_ns=clock, first_token_ns=clock + 100 * MS)


def decode_call(clock: int, sent_at: float = 0.0, *, heard_late: float = 0.0) -> WorkerCall:
    """Each way takes 10 ms. Decode has the blocks 140 ms after the request, and repeats prefill's token at once.

    Its own first token takes long, since its batch is full.
    """
    times = {"transfer_start_ns": 100, "transfer_end_ns": 140, "first_token_ns": 400, "finished_ns": 500}
    output_at, closed_at = sent_at + 0.160, sent_at + 0.520
    absolute = {name: clock + value * MS for name, value in times.items()}
    return a_call(sent_at, output_at + heard_late, closed_at + heard_late, submitted_ns=clock, **absolute)


@pytest.mark.parametrize(("prefill_clock", "decode_clock"), [(HOUR, HOUR), (HOUR, 2 * HOUR), (2 * HOUR, HOUR)])
def test_a_hand_over_is_as_long_whatever_the_clocks_of_hosts_say(prefill_clock: int, decode_clock: int) -> None:
    prefill = prefill_call(prefill_clock)
    assert hand_over_ms(prefill, decode_call(decode_clock)) == pytest.approx(40, abs=0.01)
    late = decode_call(decode_clock, 0.115)  # it was full before, and has the request at 125 ms
    assert hand_over_ms(prefill, late) == pytest.approx(140, abs=0.01)


def test_a_gateway_that_is_late_itself_does_not_make_hand_overs_longer() -> None:
    """It has heard of both late, so nothing shows that the clocks differ."""
    prefill = prefill_call(HOUR, 0.500)
    assert hand_over_ms(prefill, decode_call(HOUR, heard_late=0.030)) == pytest.approx(40, abs=0.01)


def test_a_hand_over_without_a_second_token_is_one_and_others_are_none() -> None:
    """Decode's ledger has no times of an engine if the answer ended with prefill's token."""
    prefill, times = prefill_call(HOUR), {"transfer_start_ns": HOUR + 100 * MS, "transfer_end_ns": HOUR + 140 * MS}
    assert hand_over_ms(prefill, a_call(0.0, 0.165, 0.165, **times)) == pytest.approx(40, abs=0.01)
    assert hand_over_ms(prefill, a_call(0.0, 0.165, 0.165, submitted_ns=HOUR)) is None
    assert hand_over_ms(a_call(0.0, 0.120, 0.120), decode_call(HOUR)) is None


async def test_accounts_do_not_see_each_others_blocks() -> None:
    async with harness(ScriptedWorker("p", PREFILL), ScriptedWorker("d")) as here:
        await tokens_of(await here.dispatcher.submit(new_request()))
        stream = await here.dispatcher.submit(new_request(request_id="other", account="other"))
        assert (stream.route["cached_own_tokens"], stream.route["cached_host_tokens"]) == (0, 0)
        await tokens_of(stream)


async def test_a_choice_that_moves_goes_where_its_prompt_is() -> None:
    async def die(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        attach.tokens(submit, len(submit.token_ids), answer(1))
        here.router.prefixes.learn(blocks_of(here, PROMPT), "c-life-0", "", space=worker.space)
        attach.events.put_nowait(None)

    dying, other, knowing = ScriptedWorker("a", behave=die), ScriptedWorker("b"), ScriptedWorker("c")
    async with harness(dying, other, knowing) as here:
        here.registry.register(kv_service(), pb.LoadReport(state=pb.WORKER_STATE_READY))  # without a store
        assert await tokens_of(await here.dispatcher.submit(new_request())) == [answer()]
        assert (len(dying.submits), len(other.submits), len(knowing.submits)) == (1, 0, 1)

"""Workers of two versions serve one model: each gets what it understands, and no refusal of one reaches the client."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from control_plane.dispatch.block_hashes import PromptHashes, account_tag, cache_salt, hash_prompt
from control_plane.generation import CachePolicy
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import FingerprintMismatch, ModelNotFound, TandemError, Unavailable
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.spaces import model_identity, space_of
from tests.control_plane import harness as harnesses
from tests.control_plane.harness import FULL, PROMPT, SECRET, Harness, answer, new_request, tokens_of
from tests.control_plane.scripted_worker import (
    FINGERPRINT,
    PREFILL,
    AttachStream,
    ScriptedWorker,
    lose_after,
    only_accept,
    refuse_with,
    serve,
)
from tests.tandem_worker.kv_harness import until

NEW: dict[str, Any] = {"digest": b"n" * 16, "numerics_class": "cpu/float32/new"}
LAYOUT = pb.KvLayout(
    groups=[pb.KvGroup(layers=[0], num_kv_heads=1, k_head_size=4, v_head_size=4, dtype="float32", tokens_per_block=16)]
)
MISMATCH = FingerprintMismatch("this worker has other weights", field="model.fingerprint")
SALT = cache_salt(SECRET, "me")
harness = partial(harnesses.harness, accept_seconds=10)
"""No worker here is silent: a slow machine must not make one seem so."""


def expected_hashes(token_ids: tuple[int, ...] = PROMPT) -> PromptHashes:
    """The hashes of a prompt in grains of 16 tokens; the stand-ins' cards have no weights."""
    return hash_prompt(model_identity(pb.Fingerprint()), token_ids, SALT)


async def ask(here: Harness, request_id: str, **fields: Any) -> None:
    num_choices, max_tokens = fields.get("num_choices", 1), fields.get("max_tokens", 5)
    stream = await here.dispatcher.submit(new_request(request_id=request_id, **fields))
    assert await tokens_of(stream) == [answer(max_tokens)] * num_choices


async def test_two_classes_serve_side_by_side_and_each_is_sent_its_own_fingerprint_and_space() -> None:
    workers = [ScriptedWorker("p", PREFILL), ScriptedWorker("d"), ScriptedWorker("q", PREFILL, **NEW)]
    workers.append(ScriptedWorker("e", **NEW))
    async with harness(*workers) as here:
        for number in range(2):
            full = "d-life-0" if number else "e-life-0"  # room in one group only
            entry = here.router.in_flight.add(full, num_decode_tokens=1000)
            await ask(here, f"r{number}", max_tokens=30)
            entry.remove()
        expected = expected_hashes()
        for worker, digest in zip(workers, (FINGERPRINT, FINGERPRINT, b"n" * 16, b"n" * 16), strict=True):
            (submit,) = worker.submits
            assert (submit.model.fingerprint, submit.space) == (digest, worker.space)
            assert (submit.hash_root, submit.hash_grain) == (expected.root, 16)
            assert list(submit.block_hashes) == list(expected.blocks)
            assert submit.handle.model.fingerprint == digest and not submit.HasField("handle_layout")
        assert workers[1].submits[0].handle.prefill_incarnation == "p-life-0"
        assert workers[3].submits[0].handle.prefill_incarnation == "q-life-0"


async def test_when_one_classes_workers_are_all_gone_its_streams_go_on_with_the_other() -> None:
    old = ScriptedWorker("a", behave=lose_after(3))
    new = ScriptedWorker("b", **NEW)
    async with harness(old, new) as here:
        await ask(here, "r")
        (moved,) = new.submits
        assert list(moved.token_ids) == [*PROMPT, *answer(3)] and moved.model.fingerprint == b"n" * 16


async def test_a_stream_moves_to_its_own_class_first() -> None:
    old, other = ScriptedWorker("b", behave=lose_after(2)), ScriptedWorker("c")
    new = ScriptedWorker("a", behave=refuse_with(FULL), **NEW)
    async with harness(new, old, other) as here:
        await ask(here, "r")
        assert (len(other.submits), [len(submit.token_ids) for submit in new.submits]) in ((1, [40]), (1, []))


@pytest.mark.parametrize("refusal", [MISMATCH, ModelNotFound("this worker serves 'another'")])
async def test_a_new_request_asks_the_next_worker_however_many_are_of_another_version(refusal: TandemError) -> None:
    """Each refusal costs no attempt and no retry permit: seven in a row are more than an attempt may have."""
    prefills = [ScriptedWorker(f"p{number}", PREFILL, refuse_with(refusal)) for number in range(6)]
    decodes = [ScriptedWorker(f"d{number}", behave=refuse_with(refusal)) for number in range(6)]
    well = [ScriptedWorker("p9", PREFILL), ScriptedWorker("d9")]
    async with harness(*prefills, *decodes, *well) as here:
        await ask(here, "r")
        assert len(well[1].submits) >= 1


async def test_if_every_worker_is_of_another_version_the_client_may_try_again_later() -> None:
    async with harness(*(ScriptedWorker(name, behave=refuse_with(MISMATCH)) for name in "abc")) as here:
        with pytest.raises(Unavailable, match="no worker takes the request: this worker has other weights") as refused:
            await here.dispatcher.submit(new_request(reject_if_busy=True))
        assert refused.value.http_status == 503


async def test_a_stream_goes_on_although_a_worker_of_another_version_ranks_first() -> None:
    """findings-fleet F1 b: the stream failed although a matching worker was alive."""
    dying, heir = ScriptedWorker("a", behave=lose_after(3)), ScriptedWorker("z")
    strangers = [ScriptedWorker(name, behave=refuse_with(MISMATCH)) for name in "bcdef"]
    async with harness(dying, *strangers, heir) as here:
        await ask(here, "r")
        assert [len(stranger.submits) for stranger in strangers] == [1] * 5 and len(heir.submits) == 1


async def test_a_stream_asks_the_next_group_at_once_if_the_first_one_is_full() -> None:
    dying, full = ScriptedWorker("a", behave=lose_after(2)), ScriptedWorker("b", behave=refuse_with(FULL))
    new = ScriptedWorker("c", **NEW)
    async with harness(dying, full, new) as here:  # nothing may wait: queue_seconds is 0
        await ask(here, "r")
        assert len(new.submits) == 1


async def test_a_worker_of_release_0_2_gets_its_own_hashes_beside_one_that_takes_spaces() -> None:
    old, new = ScriptedWorker("old", takes_spaces=False, block_size=32), ScriptedWorker("new", block_size=32)
    long = tuple(range(100))
    cache = CachePolicy.of("on", 80)
    async with harness(old, new) as here:
        for avoided in (new, old):
            entry = here.router.in_flight.add(avoided.incarnation, num_decode_tokens=1500)
            await tokens_of(await here.dispatcher.submit(new_request(request_id="r", token_ids=long, cache=cache)))
            entry.remove()
    (legacy,), (submit,) = old.submits, new.submits
    theirs = hash_prompt(FINGERPRINT, long, SALT, grain=32)
    assert (legacy.hash_root, list(legacy.block_hashes)) == (theirs.root, list(theirs.blocks))
    assert (legacy.space, legacy.hash_grain, legacy.max_found_blocks, legacy.max_left_blocks) == (b"", 0, 2, 2)
    ours = expected_hashes(long)
    assert (submit.hash_root, list(submit.block_hashes)) == (ours.root, list(ours.blocks)) and len(ours.blocks) == 6
    assert (submit.space, submit.hash_grain, submit.max_found_blocks, submit.max_left_blocks) == (new.space, 16, 5, 5)
    assert legacy.account_tag == submit.account_tag == account_tag(SECRET, "me")
    assert legacy.token_ids == submit.token_ids


async def test_an_answer_that_moves_to_release_0_2_brings_that_workers_hashes() -> None:
    new, old = ScriptedWorker("a", behave=lose_after(30)), ScriptedWorker("b", takes_spaces=False)
    async with harness(new, old) as here:
        await ask(here, "r", max_tokens=40)
        (moved,) = old.submits
        whole = hash_prompt(FINGERPRINT, [*PROMPT, *answer(30)], SALT)
        assert (moved.hash_root, list(moved.block_hashes)) == (whole.root, list(whole.blocks))
        # What it generated is found again, although it keeps the blocks under keys of its own.
        again = await here.dispatcher.submit(new_request(request_id="again", token_ids=(*PROMPT, *answer(40), 5)))
        await tokens_of(again)
        assert again.route["cached_own_tokens"] == 64 and again.state.choices[0].call is not None
        assert again.state.choices[0].call.worker_id == "b"


async def test_a_reader_with_another_layout_is_told_the_writers() -> None:
    there = pb.KvLayout()
    there.CopyFrom(LAYOUT)
    there.groups[0].dtype, there.groups[0].tokens_per_block = "bfloat16", 32
    prefill = ScriptedWorker("p", PREFILL, exactness="layout", layout=LAYOUT)
    decode = ScriptedWorker("d", exactness="layout", layout=there, block_size=32, **NEW)
    async with harness(prefill, decode) as here:
        await ask(here, "r")
        (written,), (read,) = prefill.submits, decode.submits
        assert written.handle == read.handle and not written.HasField("handle_layout")
        assert (read.handle.model.fingerprint, read.handle.layout_digest) == (FINGERPRINT, layout_digest(LAYOUT))
        assert read.handle_layout == LAYOUT and read.space == written.space == space_of(prefill.info().card)


async def test_a_choice_that_moves_out_of_its_prefills_group_computes_the_prompt() -> None:
    prefill, reader = ScriptedWorker("p", PREFILL, only_accept), ScriptedWorker("a", behave=lose_after(0))
    other = ScriptedWorker("b", **NEW)
    async with harness(prefill, reader, other, queue_seconds=5) as here:
        await ask(here, "r")
        (moved,) = other.submits
        assert list(moved.token_ids) == list(PROMPT) and not moved.HasField("handle")


async def test_one_copy_of_the_prompt_is_sent_in_each_form() -> None:
    async def note(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        num_read[worker.worker_id] += 1
        await serve(worker, attach, submit)

    num_read: Counter[str] = Counter()
    workers = [ScriptedWorker("a", behave=note), ScriptedWorker("b", behave=note, takes_spaces=False)]
    async with harness(*workers) as here:
        for worker in workers:
            await until(lambda worker=worker: bool(worker.hellos))  # type: ignore[misc]
        state = (await here.dispatcher.submit(new_request(num_choices=4))).state
        forms = [state.forms.of(worker.info().card) for worker in workers]
        assert forms[0].wire is state.forms.of(workers[0].info().card).wire and forms[0].wire != forms[1].wire
        assert pb.Submit.FromString(forms[0].wire).token_ids == pb.Submit.FromString(forms[1].wire).token_ids
        state.close()
        await until(lambda: here.nothing_is_left())

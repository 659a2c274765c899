"""Each worker gets exactly what it needs, and a handle cannot be forged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.dispatch.block_hashes import PromptHashes, hash_prompt
from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.submitter import decode_submit, mint_handle, prefill_submit
from control_plane.fleet.registry import Worker
from control_plane.generation import TokenRequest
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine.grammar import Grammar
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import TandemError
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.signatures import HandleSigner, HandleVerifier
from tandem_runtime.kv.spaces import model_identity
from tandem_worker.convert import add_request, sampling_from_proto
from tests.control_plane.dispatch.test_request_stream import Events

SIGNER = HandleSigner(b"k" * 32)
VERIFIER = HandleVerifier(lambda: KvKeys((SIGNER.public_key,)))
CARD = pb.ModelCard(
    model_id="m", fingerprint=pb.Fingerprint(digest=b"f" * 16), block_size=16, takes_spaces=True, exactness="class"
)
SAMPLING = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_p=0.75,
    top_k=40,
    min_p=0.125,
    repetition_penalty=1.25,
    frequency_penalty=-0.5,
    presence_penalty=0.25,
    logit_bias={3: -100.0},
    seed=2**63 + 1,
    num_logprobs=0,
    stop_token_ids=(2, 7),
    min_tokens=1,
    grammar=Grammar("json_schema", '{"type":"string"}'),
)
WORKER = Worker(pb.WorkerInfo(worker_id="w", incarnation="w-1", card=CARD), pb.LoadReport(), 0.0, space=b"s" * 16)
IDENTITY = model_identity(CARD.fingerprint)
REQUEST = TokenRequest("r", "me", "m", tuple(range(40)), SAMPLING, (5, 6), deadline=time.monotonic() + 60)


def new_state(hashes: PromptHashes | None = None, *, attempt: int = 0, answer: Sequence[int] = ()) -> RequestState:
    """Return a request at an attempt, whose first choice has some tokens."""
    state = RequestState(REQUEST, CARD, hashes, Events())
    for _ in range(attempt):
        state.next_attempt()
    state.receive(state.choices[0], pb.TokenOutput(position=len(REQUEST.token_ids), token_ids=answer))
    return state


def handle() -> pb.KvHandle:
    prefill = Worker(pb.WorkerInfo(incarnation="p-1", card=CARD), pb.LoadReport(), 0.0)
    holder = cp.KvServiceAddress(address="host:1", incarnation="kv-1", worker_id="kv-a")
    return mint_handle(new_state(attempt=3), prefill, holder, SIGNER)


def sent(state: RequestState, submit: pb.Submit) -> pb.Submit:
    """Return what a worker reads: the prompt, and the rest after it."""
    return pb.Submit.FromString(state.forms.of(CARD).wire + submit.SerializeToString())


def test_no_sampling_parameter_is_lost_on_the_way() -> None:
    state = new_state()
    state.route_chosen({}, handle())
    assert sampling_from_proto(prefill_submit(state, WORKER).sampling) == SAMPLING


def test_prefill_fills_the_handle_for_all_choices_and_each_decode_takes_its_own() -> None:
    state = new_state(hash_prompt(IDENTITY, REQUEST.token_ids, b"salt"), attempt=3)
    state.route_chosen({}, handle())
    prefill = sent(state, prefill_submit(state, WORKER))
    first, second = (sent(state, decode_submit(state, choice, WORKER)) for choice in state.choices)
    assert (prefill.handle.holder_address, prefill.handle.holder_id) == ("host:1", "kv-a")
    assert (prefill.request_id, first.request_id, second.request_id) == ("r", "r-0", "r-1")
    assert list(prefill.choice_seeds) == [5, 6] and not first.choice_seeds
    assert (first.sampling.seed, second.sampling.seed, second.choice_index) == (5, 6, 1)
    assert len(prefill.block_hashes) == 2 and first.block_hashes == prefill.block_hashes
    assert prefill.handle.num_readers == 2 and prefill.handle.attempt == prefill.attempt == 3
    assert first.handle == second.handle == prefill.handle


def test_an_engine_is_told_which_choices_are_offered_together() -> None:
    offers = []
    for attempt in (3, 4):
        state = new_state(attempt=attempt)
        state.route_chosen({}, handle())
        commands = [add_request(decode_submit(state, choice, WORKER), "key", "decode") for choice in state.choices]
        offers += [(command.choice_of, command.attempt) for command in commands]
    assert offers == [("r", 3), ("r", 3), ("r", 4), ("r", 4)]


def test_a_choice_that_goes_on_elsewhere_brings_its_tokens_and_its_prompts_length() -> None:
    state = new_state(attempt=1, answer=(100, 101))
    state.route_chosen({}, handle())
    moved = sent(state, decode_submit(state, state.choices[0], WORKER))
    assert list(moved.token_ids) == [*range(40), 100, 101]
    assert moved.num_prompt_tokens == 40 and not moved.HasField("handle") and not moved.hash_root


def test_the_hashes_of_an_answer_that_has_begun_go_on_with_the_prompts_chain() -> None:
    prompt, answer = list(REQUEST.token_ids), list(range(100, 130))
    hashes = hash_prompt(IDENTITY, prompt, b"salt", b"tag")
    whole = hash_prompt(IDENTITY, [*prompt, *answer], b"salt")
    assert hashes.with_answer(prompt, answer) == whole.blocks
    state = new_state(hashes, attempt=1, answer=answer)
    moved = sent(state, decode_submit(state, state.choices[0], WORKER))
    assert tuple(moved.block_hashes) == whole.blocks and moved.account_tag == b"tag"


def test_a_choice_that_goes_on_elsewhere_is_bounded_as_its_request_was() -> None:
    hashes = replace(
        hash_prompt(IDENTITY, REQUEST.token_ids, b"salt", b"tag", 16), max_found_blocks=2, max_left_blocks=0
    )
    state = new_state(hashes, attempt=1, answer=range(100, 130))
    moved = sent(state, decode_submit(state, state.choices[0], WORKER))
    assert (moved.max_found_blocks, moved.max_left_blocks, moved.num_public_blocks) == (2, 0, 1)
    assert moved.HasField("max_left_blocks")


def test_hashes_differ_by_salt_and_not_otherwise() -> None:
    one, same, other = (hash_prompt(IDENTITY, REQUEST.token_ids, salt) for salt in (b"a", b"a", b"b"))
    assert one == same
    assert one.root != other.root and not set(one.blocks) & set(other.blocks)


@pytest.mark.parametrize("field", ["request_id", "holder_address", "prefill_incarnation", "num_readers"])
def test_a_handle_that_was_changed_does_not_verify(field: str) -> None:
    forged = handle()
    VERIFIER.verify(forged)
    value = getattr(forged, field)
    setattr(forged, field, value + 1 if isinstance(value, int) else value + "x")
    with pytest.raises(TandemError):
        VERIFIER.verify(forged)


def test_handles_are_not_to_be_guessed() -> None:
    assert handle().handle_id != handle().handle_id

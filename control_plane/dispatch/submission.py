"""What exactly is sent to a worker for one request?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from control_plane.dispatch.block_hashes import Hashes
from control_plane.fleet.registry import Worker
from control_plane.generation import TokenRequest
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.grammar import Grammar
from tandem_engine.scheduling.sampling_params import SamplingParams
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.mac import sign_handle


def model_ref(card: pb.ModelCard) -> pb.ModelRef:
    return pb.ModelRef(model_id=card.model_id, fingerprint=card.fingerprint.digest)


def mint_handle(
    request: TokenRequest, attempt: int, card: pb.ModelCard, prefill: Worker, holder: cp.KvServiceAddress, key: bytes
) -> pb.KvHandle:
    """Return a signed handle for the prompt, kept by the KV service of prefill's host."""
    handle = pb.KvHandle(
        handle_id=os.urandom(16),
        request_id=request.request_id,
        attempt=attempt,
        prefill_incarnation=prefill.incarnation,
        holder_address=holder.address,
        holder_incarnation=holder.incarnation,
        model=model_ref(card),
        layout_digest=layout_digest(card.layout),
        num_tokens=len(request.token_ids),
        num_readers=len(request.choice_seeds),
        deadline_unix_ms=int(request.deadline * 1000),
    )
    return sign_handle(handle, key)


def base_submit(
    request: TokenRequest, attempt: int, card: pb.ModelCard, hashes: Hashes | None, traceparent: str
) -> pb.Submit:
    """Return what prefill and decode are told alike."""
    submit = pb.Submit(
        request_id=request.request_id,
        attempt=attempt,
        model=model_ref(card),
        token_ids=request.token_ids,
        num_prompt_tokens=len(request.token_ids),
        sampling=sampling_to_proto(request.sampling),
        deadline_unix_ms=int(request.deadline * 1000),
        traceparent=traceparent,
        priority=request.priority,
        fairness_key=request.fairness_key,
    )
    if hashes is not None:
        submit.hash_root = hashes.root
        submit.block_hashes.extend(hashes.blocks)
        submit.account_tag = hashes.account_tag
        submit.num_public_blocks = hashes.num_public_blocks
        if hashes.max_found_blocks is not None:
            submit.max_found_blocks = hashes.max_found_blocks
        if hashes.max_left_blocks is not None:
            submit.max_left_blocks = hashes.max_left_blocks
    return submit


def prefill_submit(base: pb.Submit, request: TokenRequest, handle: pb.KvHandle) -> pb.Submit:
    submit = pb.Submit()
    submit.CopyFrom(base)
    submit.choice_seeds.extend(request.choice_seeds)
    submit.handle.CopyFrom(handle)
    return submit


def decode_submit(
    base: pb.Submit,
    request: TokenRequest,
    choice_index: int,
    handle: pb.KvHandle | None,
    so_far: Sequence[int],
    block_hashes: Sequence[bytes] = (),
) -> pb.Submit:
    """Return a choice's request for decode.

    `so_far` holds its tokens, if it goes on from another worker's; `block_hashes` then those of prompt and tokens.
    """
    submit = pb.Submit()
    submit.CopyFrom(base)
    submit.request_id = f"{request.request_id}-{choice_index}"
    submit.choice_index = choice_index
    submit.sampling.seed = request.choice_seeds[choice_index]
    submit.token_ids.extend(so_far)
    if block_hashes:
        submit.block_hashes[:] = block_hashes
    if handle is not None:
        submit.handle.CopyFrom(handle)
    return submit


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
    )
    if params.num_logprobs is not None:
        message.num_logprobs = params.num_logprobs
    if params.grammar is not None:
        message.grammar.CopyFrom(grammar_to_proto(params.grammar))
    return message


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=pb.GrammarKind.Value(f"GRAMMAR_KIND_{grammar.kind.upper()}"), text=grammar.text)

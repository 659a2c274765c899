"""Converts requests and tokens between the wire (protobuf) and the engine process (tandem_engine.messages)."""

from __future__ import annotations

from tandem.v1 import types_pb2 as pb
from tandem_engine import messages
from tandem_engine.grammar import Grammar, GrammarKind
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.thinking import Thinking
from tandem_runtime.errors import ContextTooLong, InternalError, InvalidRequest, Overloaded, TandemError, Unsupported

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    None: pb.FINISH_REASON_UNSPECIFIED,
}

_GRAMMAR_KINDS: dict[pb.GrammarKind.ValueType, GrammarKind] = {
    pb.GRAMMAR_KIND_JSON_OBJECT: "json_object",
    pb.GRAMMAR_KIND_JSON_SCHEMA: "json_schema",
    pb.GRAMMAR_KIND_REGEX: "regex",
    pb.GRAMMAR_KIND_LARK: "lark",
}

_REFUSALS: dict[str, type[TandemError]] = {
    "invalid": InvalidRequest,
    "context": ContextTooLong,
    "queue_full": Overloaded,
    "kv_full": Overloaded,
    "unsupported": Unsupported,
}


def sampling_from_proto(params: pb.SamplingParams) -> SamplingParams:
    """Return the engine's sampling parameters; raises InvalidRequest naming a field that is out of range."""
    try:
        return SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=dict(params.logit_bias),
            num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
            stop_token_ids=tuple(params.stop_token_ids),
            min_tokens=params.min_tokens,
            grammar=_grammar(params.grammar) if params.HasField("grammar") else None,
            thinking=_thinking(params.thinking) if params.HasField("thinking") else None,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _grammar(grammar: pb.Grammar) -> Grammar:
    if grammar.kind not in _GRAMMAR_KINDS:
        raise ValueError(f"grammar.kind is {grammar.kind}, which this worker does not support")
    return Grammar(_GRAMMAR_KINDS[grammar.kind], grammar.text)


def _thinking(thinking: pb.Thinking) -> Thinking:
    return Thinking(
        tuple(thinking.end_token_ids),
        tuple(thinking.forced_token_ids),
        thinking.start_token_id if thinking.HasField("start_token_id") else None,
        thinking.max_tokens if thinking.HasField("max_tokens") else None,
    )


def add_request(
    submit: pb.Submit, request_id: str, mode: messages.Mode, chain: messages.ChainEnd | None = None
) -> messages.AddRequest:
    """Return the engine's command for a gateway's Submit whose hashes are keys already; raises InvalidRequest."""
    return messages.AddRequest(
        request_id=request_id,
        token_ids=list(submit.token_ids),
        num_prompt_tokens=submit.num_prompt_tokens,
        sampling=sampling_from_proto(submit.sampling),
        mode=mode,
        hash_root=submit.hash_root.hex(),
        block_hashes=[block_hash.hex() for block_hash in submit.block_hashes],
        chain=chain,
        max_found_blocks=submit.max_found_blocks if submit.HasField("max_found_blocks") else None,
        max_left_blocks=submit.max_left_blocks if submit.HasField("max_left_blocks") else None,
        adapter=submit.adapter.name,
        choice_seeds=list(submit.choice_seeds),
        priority=submit.priority,
        fairness_key=submit.fairness_key,
        choice_of=submit.handle.request_id if mode == "decode" else "",
        attempt=submit.attempt,
    )


def refusal(refused: messages.Refused) -> TandemError:
    """Return the error for an engine's refusal; an overloaded worker asks for a retry after 1 s."""
    kind = _REFUSALS.get(refused.reason, InternalError)
    return kind(refused.message, retry_after_seconds=1.0 if kind is Overloaded else None)


def output_to_proto(output: messages.RequestOutput, submit: pb.Submit) -> pb.TokenOutput:
    """Return new tokens in wire form, without a ledger."""
    return pb.TokenOutput(
        request_id=submit.request_id,
        attempt=submit.attempt,
        choice_index=submit.choice_index or output.choice_index,
        token_ids=output.token_ids,
        position=output.position,
        logprobs=[_logprobs(position) for position in output.logprobs],
        finish_reason=FINISH_REASONS[output.finish_reason],
    )


def ledger(output: messages.RequestOutput, submit: pb.Submit) -> pb.PhaseLedger:
    """Return the ledger of a request from the last output of the engine."""
    return pb.PhaseLedger(
        num_prompt_tokens=submit.num_prompt_tokens,
        num_computed_tokens=output.num_computed_tokens,
        num_cached_tokens=output.num_cached_tokens,
        num_loaded_tokens=output.num_loaded_tokens,
        num_generated_tokens=output.num_generated_tokens,
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
        num_preemptions=output.num_preemptions,
        submitted_ns=output.times.added_ns,
        scheduled_ns=output.times.scheduled_ns,
        first_token_ns=output.times.first_token_ns,
        finished_ns=output.times.finished_ns,
    )


def aborted_ledger(aborted: messages.RequestAborted, submit: pb.Submit) -> pb.PhaseLedger:
    """Return the ledger of a request that the engine did not finish."""
    return pb.PhaseLedger(
        num_prompt_tokens=submit.num_prompt_tokens,
        num_computed_tokens=aborted.num_computed_tokens,
        num_cached_tokens=aborted.num_cached_tokens,
        num_loaded_tokens=aborted.num_loaded_tokens,
        num_generated_tokens=aborted.num_generated_tokens,
    )


def _logprobs(position: messages.PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(chosen=_logprob(position.chosen), top=[_logprob(other) for other in position.top])


def _logprob(logprob: messages.Logprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)

"""Builds and sends the Submit of one call to a worker, and takes in the events that the worker answers with."""

from __future__ import annotations

import asyncio
import os
import time

from control_plane.dispatch.class_seams import note_decode, note_prefill, note_repeated
from control_plane.dispatch.request_state import GRACE_SECONDS, ChoiceState, RequestState
from control_plane.dispatch.room_keeper import RoomKeeper
from control_plane.dispatch.route_feedback import RouteFeedback
from control_plane.dispatch.stall_watch import StallWatch
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.worker_health import LONGEST_SILENCE_SECONDS
from control_plane.fleet.worker_links import LinkPool
from control_plane.routing.block_stores import NOTHING_CACHED
from control_plane.routing.cost_model import PrefillEstimate
from control_plane.routing.router import Route, Router
from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import DeadlineExceeded, TandemError, Unavailable
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.signatures import HandleSigner


class Submitter:
    """Sends calls over the workers' links, and counts their tokens as in flight."""

    def __init__(
        self,
        registry: WorkerRegistry,
        links: LinkPool,
        router: Router,
        feedback: RouteFeedback,
        accept_seconds: float,
        signer: HandleSigner,
        stalls: StallWatch,
        rooms: RoomKeeper,
    ) -> None:
        """`signer` signs KV handles."""
        self._registry = registry
        self._signer = signer
        self._links = links
        self._in_flight = router.in_flight
        self._health = router.health
        self._costs = router.costs
        self._stalls = stalls
        self._rooms = rooms
        self._feedback = feedback
        self._accept_seconds = accept_seconds

    def new_handle(self, state: RequestState, route: Route) -> pb.KvHandle | None:
        """Return a handle at the KV service of the route's prefill worker.

        Return None without a prefill worker or KV service, or if every choice has its first token already.
        """
        if route.prefill is None or all(choice.tokens for choice in state.choices):
            return None
        holders = self._holders(route.prefill)
        return mint_handle(state, route.prefill, holders[0], self._signer) if holders else None

    def submit_prefill(self, state: RequestState, worker: Worker, route: Route) -> WorkerCall:
        """Send the prompt to a prefill worker, which seals its KV blocks under the state's handle."""
        call = self._new_call(worker, prefill_submit(state, worker), route, None)
        self._watch(state, call, route)
        state.call_started(call)
        prompt = state.forms.of(worker.info.card).wire
        call.link.submit(call.submit, PrefillSink(state, call, self._feedback), prompt)
        return call

    def submit_choice(self, state: RequestState, choice: ChoiceState, worker: Worker, route: Route) -> WorkerCall:
        """Send a choice to a decode worker, which continues from the choice's tokens so far."""
        call = self._new_call(worker, decode_submit(state, choice, worker), route, choice.index)
        self._watch(state, call, route)
        state.call_started(call)
        prompt = state.forms.of(worker.info.card).wire
        call.link.submit(call.submit, DecodeSink(state, choice, call, self._feedback), prompt)
        return call

    async def wait_accepted(self, state: RequestState, call: WorkerCall) -> None:
        """Return once the worker has accepted; the request avoids a worker that refuses or does not answer.

        Raises the worker's refusal, Unavailable if there is no answer, and DeadlineExceeded once the request's deadline
        has passed.
        """
        seconds_left = state.seconds_left + GRACE_SECONDS
        try:
            async with asyncio.timeout(max(0.0, min(self._accept_seconds, seconds_left))):
                await call.answered
        except TimeoutError as error:
            if call.watch is not None and seconds_left >= self._accept_seconds:
                reason = f"it did not answer a Submit for {self._accept_seconds:g} s"
                call.watch.failed(reason, is_certain=self._accept_seconds >= LONGEST_SILENCE_SECONDS)
            call.close(cancel=True)
            state.avoid_worker(call.incarnation)
            if seconds_left < self._accept_seconds:
                raise DeadlineExceeded("the request's deadline passed before a worker had accepted it") from error
            raise Unavailable(
                f"worker {call.link.worker.worker_id} did not answer within {self._accept_seconds:g} s",
                retry_after_seconds=1.0,
            ) from error
        except TandemError:
            state.avoid_worker(call.incarnation)
            raise

    def new_trial(self, state: RequestState, worker: Worker, estimate: PrefillEstimate) -> WorkerCall:
        """Return a call, not sent yet, that lets a worker on probation compute the first token of a request's copy.

        A prefill worker seals its blocks under a handle of the call's own. Raises Unavailable if the worker has gone.
        """
        is_decode = worker.role == pb.WORKER_ROLE_DECODE
        submit = self._decode_trial(state, worker) if is_decode else self._prefill_trial(state, worker)
        submit.request_id = f"{state.request.request_id}-trial-{os.urandom(4).hex()}"
        submit.sampling.max_tokens = 1
        submit.sampling.min_tokens = min(1, submit.sampling.min_tokens)
        call = WorkerCall(self._links.get(worker), submit, self._in_flight.add(worker.incarnation), 0)
        predicted_ms = self._costs.local_ms(estimate) if is_decode else estimate.total_ms
        call.follow(self._health.watch(worker, predicted_ms / 1000))
        return call

    def _decode_trial(self, state: RequestState, worker: Worker) -> pb.Submit:
        submit = decode_submit(state, ChoiceState(0), worker)
        submit.ClearField("handle")
        return submit

    def _prefill_trial(self, state: RequestState, worker: Worker) -> pb.Submit:
        holders = self._holders(worker)
        if not holders:
            raise Unavailable(f"worker {worker.worker_id} has no KV service")
        return prefill_submit(state, worker, mint_handle(state, worker, holders[0], self._signer))

    def _holders(self, prefill: Worker) -> list[cp.KvServiceAddress]:
        address = prefill.info.kv_address
        return [kv for kv in self._registry.kv_services(prefill.info.host_id) if kv.address == address]

    def _watch(self, state: RequestState, call: WorkerCall, route: Route) -> None:
        """Let the call count for its worker's health: one call per request and worker, and none of a probe."""
        if state.request.is_probe or call.choice_index:
            return
        if call.is_prefill or call.estimate is None:
            predicted_ms = call.estimate.total_ms if call.estimate is not None else None
        else:
            predicted_ms = self._costs.local_ms(call.estimate)
        call.follow(self._health.watch(call.link.worker, None if predicted_ms is None else predicted_ms / 1000))
        self._stalls.add(state, call)

    def _new_call(self, worker: Worker, submit: pb.Submit, route: Route, choice_index: int | None) -> WorkerCall:
        """Return a call that is counted as in flight; raises Unavailable if the worker has gone."""
        link = self._links.get(worker)
        computes_prompt = choice_index is None or not submit.HasField("handle")
        estimate = route.estimate(worker) if computes_prompt else None
        cached = estimate.cached if estimate is not None else NOTHING_CACHED
        submit.prefix_source, submit.prefix_source_id = cached.source, cached.source_id
        if estimate is not None and cached.source:
            submit.prefix_wait_ms = round(self._costs.prefix_wait_ms(estimate))
        num_tokens = submit.num_prompt_tokens + len(submit.token_ids)
        num_to_compute = estimate.num_computed_tokens if estimate is not None else num_tokens
        is_decode = choice_index is not None
        entry = self._in_flight.add(
            worker.incarnation,
            num_prefill_tokens=num_to_compute if computes_prompt else 0,
            num_decode_tokens=num_tokens + submit.sampling.max_tokens if is_decode else 0,
            num_answers=1 if is_decode else 0,
        )
        num_counted = num_tokens - cached.own if is_decode else num_to_compute  # memory here, time there
        room = self._rooms.sent(worker, max(1, num_counted))
        submit.grant_tokens = room.num_tokens
        return WorkerCall(link, submit, entry, choice_index, estimate, room, self._rooms.on_room(worker))


class PrefillSink:
    """Takes in the events of the call that computes the prompt. Implements worker_links.Sink."""

    def __init__(self, state: RequestState, call: WorkerCall, feedback: RouteFeedback) -> None:
        self._state = state
        self._call = call
        self._feedback = feedback

    def accepted(self) -> None:
        self._call.answer(None)

    def output(self, output: pb.TokenOutput) -> None:
        state = self._state
        choice = state.choices[output.choice_index]
        if not choice.tokens:  # else decode was faster and computed the prompt itself
            state.receive(choice, output)
            if choice.tokens:
                note_prefill(state, choice, self._call)
        if output.token_ids:
            _note_output(state, self._call, output, self._feedback)
            self._feedback.hand_over_began(state, self._call)
        if output.HasField("ledger"):
            state.prefill_ledger_received(output.ledger)
            if output.choice_index == len(state.choices) - 1:
                state.prefill_ended()

    def worked(self, ledger: pb.PhaseLedger) -> None:
        self._state.worked(ledger)

    def ended(self, error: TandemError) -> None:
        is_refusal = self._call.answer(error)
        is_past_deadline = self._state.seconds_left <= 0
        self._state.doubts.heard(self._call, error, is_refusal=is_refusal, is_past_deadline=is_past_deadline)
        self._state.prefill_ended()
        if not is_refusal:
            self._state.call_failed(self._call, error)


class DecodeSink:
    """Takes in the events of the call that generates one choice. Implements worker_links.Sink."""

    def __init__(self, state: RequestState, choice: ChoiceState, call: WorkerCall, feedback: RouteFeedback) -> None:
        self._state = state
        self._choice = choice
        self._call = call
        self._feedback = feedback

    def accepted(self) -> None:
        self._call.answer(None)

    def output(self, output: pb.TokenOutput) -> None:
        self._state.receive(self._choice, output)
        has_ledger = output.HasField("ledger")
        if (has_ledger or not self._call.has_output) and output.token_ids:
            _note_output(self._state, self._call, output, self._feedback)
        if has_ledger:
            note_repeated(self._state, self._choice, self._call, output.ledger)
            self._state.choice_ledger_received(self._choice, output.ledger, is_fresh=self._call.is_fresh)
            self._call.close(cancel=False)

    def worked(self, ledger: pb.PhaseLedger) -> None:
        self._state.worked(ledger)

    def ended(self, error: TandemError) -> None:
        is_refusal = self._call.answer(error)
        is_past_deadline = self._state.seconds_left <= 0
        self._state.doubts.heard(self._call, error, is_refusal=is_refusal, is_past_deadline=is_past_deadline)
        self._call.close(cancel=False)
        if not is_refusal:
            self._state.call_failed(self._call, error)


def _note_output(state: RequestState, call: WorkerCall, output: pb.TokenOutput, feedback: RouteFeedback) -> None:
    """Note that the worker has the prompt's KV cache, and what the call did once it has ended."""
    if not call.has_output:
        call.output_began()
        state.history.output_began(call)
        if not call.is_prefill:
            note_decode(state, call)
        feedback.prompt_read(state, call)
    if output.HasField("ledger"):
        state.phase_ended(call, output.ledger)
        feedback.ledger_received(state, call, output.ledger)


# ------------------------------------------------------------------------------------------------------- messages
#
# A Submit of these functions is for one worker. It lacks the prompt's token ids and block hashes. The
# link sends them before it: they are a form of `RequestState.forms`, the same bytes for all calls to workers of a kind.


def mint_handle(state: RequestState, prefill: Worker, holder: cp.KvServiceAddress, signer: HandleSigner) -> pb.KvHandle:
    """Return a signed handle for the prompt at a KV service of the prefill worker's host."""
    handle = pb.KvHandle(
        handle_id=os.urandom(16),
        request_id=state.request.request_id,
        attempt=state.attempt,
        prefill_incarnation=prefill.incarnation,
        holder_address=holder.address,
        holder_incarnation=holder.incarnation,
        holder_id=holder.worker_id,
        model=_model_ref(prefill.info.card),
        layout_digest=layout_digest(prefill.info.card.layout),
        num_tokens=len(state.request.token_ids),
        num_readers=len(state.request.choice_seeds),
        deadline_unix_ms=_deadline_unix_ms(state),
    )
    return signer.sign(handle)


def prefill_submit(state: RequestState, worker: Worker, handle: pb.KvHandle | None = None) -> pb.Submit:
    """Return the message for a prefill worker, after the prompt: a seed for the first token of each choice.

    `handle`: of a trial; else the state's.
    """
    handle = handle or state.handle
    assert handle is not None, "a prefill worker seals its blocks under a handle"
    submit = _base_submit(state, worker)
    submit.work = state.predicted.prompt + state.predicted.answer * len(state.request.choice_seeds)
    submit.choice_seeds.extend(state.request.choice_seeds)
    submit.handle.CopyFrom(handle)
    return submit


def decode_submit(state: RequestState, choice: ChoiceState, worker: Worker) -> pb.Submit:
    """Return the message for a decode worker, after the prompt.

    A choice without tokens takes the prompt's KV cache by the handle, if there is one and the worker can read its
    blocks. A choice with tokens continues from them, and its block hashes cover prompt and tokens.
    """
    submit = _base_submit(state, worker)
    submit.work_of_answer = state.predicted.answer
    submit.work = state.predicted.answer + (0.0 if choice.index else state.predicted.prompt)
    submit.request_id = f"{state.request.request_id}-{choice.index}"
    submit.choice_index = choice.index
    submit.sampling.seed = state.request.choice_seeds[choice.index]
    submit.token_ids.extend(choice.tokens)
    hashes = state.forms.of(worker.info.card).hashes
    if hashes is not None and choice.tokens:
        submit.block_hashes.extend(hashes.after_prompt(state.request.token_ids, choice.tokens))
    if state.handle is not None and not choice.tokens:
        _add_handle(submit, state.handle, state.writer, worker)
    return submit


def _add_handle(submit: pb.Submit, handle: pb.KvHandle, writer: Worker | None, reader: Worker) -> None:
    """Let the worker pull the handle's blocks, unless their writer belongs to another space."""
    if writer is not None:
        if writer.space != reader.space:
            return
        if writer.info.card.layout != reader.info.card.layout:
            submit.handle_layout.CopyFrom(writer.info.card.layout)
    submit.handle.CopyFrom(handle)


def _base_submit(state: RequestState, worker: Worker) -> pb.Submit:
    """Return what prefill and decode have in common, besides the prompt."""
    card = worker.info.card
    request, hashes = state.request, state.forms.of(card).hashes
    submit = pb.Submit(
        request_id=request.request_id,
        attempt=state.attempt,
        model=_model_ref(card),
        num_prompt_tokens=len(request.token_ids),
        sampling=sampling_to_proto(request.sampling),
        deadline_unix_ms=_deadline_unix_ms(state),
        time_left_ms=max(0, int(state.seconds_left * 1000)),
        traceparent=state.traceparent,
        priority=request.priority,
        fairness_key=request.account,
    )
    if request.adapter is not None:
        submit.adapter.CopyFrom(pb.Adapter(name=request.adapter.name, digest=request.adapter.digest))
    if card.takes_spaces:
        submit.space = worker.space
    if hashes is not None:
        if card.takes_spaces:
            submit.hash_grain = hashes.grain
        submit.hash_root = hashes.root
        submit.account_tag = hashes.account_tag
        submit.num_public_blocks = hashes.num_public_blocks
        if hashes.max_found_blocks is not None:
            submit.max_found_blocks = hashes.max_found_blocks
        if hashes.max_left_blocks is not None:
            submit.max_left_blocks = hashes.max_left_blocks
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
        kind = pb.GrammarKind.Value(f"GRAMMAR_KIND_{params.grammar.kind.upper()}")
        message.grammar.CopyFrom(pb.Grammar(kind=kind, text=params.grammar.text))
    if (thinking := params.thinking) is not None:
        message.thinking.CopyFrom(
            pb.Thinking(
                end_token_ids=thinking.end_token_ids,
                forced_token_ids=thinking.forced_token_ids,
                start_token_id=thinking.start_token_id,
                max_tokens=thinking.max_tokens,
            )
        )
    return message


def _deadline_unix_ms(state: RequestState) -> int:
    """Return the deadline by this gateway's time of day: for processes of release 0.2, which know no time left."""
    return int((time.time() + state.seconds_left) * 1000)


def _model_ref(card: pb.ModelCard) -> pb.ModelRef:
    return pb.ModelRef(model_id=card.model_id, fingerprint=card.fingerprint.digest)

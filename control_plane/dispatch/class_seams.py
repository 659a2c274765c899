"""Notes which worker's numerics class produces a choice's tokens, and reports streams that move to another class.

A stream moves to another class if no worker of its own class can take it. The answer, its ledger row and its
explanation have the place: a seam (`control_plane.explain.class_seams`).
"""

from __future__ import annotations

from control_plane.dispatch.request_state import ChoiceState, RequestState
from control_plane.dispatch.worker_call import WorkerCall
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.numerics import gives_equal_bits
from tandem_runtime.log import get_logger

log = get_logger(__name__)


def note_prefill(state: RequestState, choice: ChoiceState, call: WorkerCall) -> None:
    """Note that a prefill worker has produced the first token of a choice."""
    worker = call.link.worker
    state.history.classes.begin(choice.index, 0, worker.worker_id, worker.info.card.fingerprint)


def note_decode(state: RequestState, call: WorkerCall) -> None:
    """Note that a decode worker's tokens of its choice have begun; once per call, with its first tokens."""
    assert call.choice_index is not None, "a decode call generates a choice"
    worker, classes = call.link.worker, state.history.classes
    position = len(call.submit.token_ids)  # of the answer so far; the prompt is not in it
    if position == 0 and classes.has_begun(call.choice_index):
        position = 1  # prefill's token, which a decode worker repeats
    seam = classes.begin(call.choice_index, position, worker.worker_id, worker.info.card.fingerprint)
    if seam is not None and not call.is_fresh:  # a hand-over crosses in every request, if it does
        log.warning(
            "stream_crossed_class",
            request_id=state.request.request_id,
            choice=seam.choice,
            position=seam.position,
            worker=worker.worker_id,
            from_class=seam.before.numerics_class,
            to_class=seam.after.numerics_class,
        )


def note_repeated(state: RequestState, choice: ChoiceState, call: WorkerCall, ledger: pb.PhaseLedger) -> None:
    """Note that the first token of a choice was prefill's, although decode's stream, which repeats it, came first.

    The ledger of decode's call tells: the worker has sampled fewer tokens than its stream had.
    """
    run, prefill = state.history.classes.at(choice.index, 1), state.prefill
    has_all = call.is_fresh and run is not None and run.worker_id == call.worker_id
    if prefill is not None and has_all and ledger.num_generated_tokens < len(choice.tokens):
        worker = prefill.link.worker
        state.history.classes.begin_before(choice.index, worker.worker_id, worker.info.card.fingerprint)


def is_exact_move(state: RequestState, call: WorkerCall) -> bool:
    """Return whether a moved choice goes on with the tokens that the worker before `call` would have sampled.

    It does if the class gives equal bits (law 3 in docs/architecture.md) and is that of the last token so far.
    """
    assert call.choice_index is not None, "a decode call generates a choice"
    numerics_class = call.link.worker.info.card.fingerprint.numerics_class
    num_tokens = len(call.submit.token_ids)
    last = state.history.classes.at(call.choice_index, num_tokens) if num_tokens else None
    return (last is None or last.numerics_class == numerics_class) and gives_equal_bits(numerics_class)

"""Which of the tokens that were drawn for an answer count, and what is told of them?"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_engine.messages import FinishReason, RequestOutput
from tandem_engine.scheduling.batch import ScheduledRun
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request, Sampled


def take_tokens(
    run: ScheduledRun, drawn: Sequence[Sampled], context_length: int, ledger: Ledger
) -> tuple[RequestOutput, FinishReason | None]:
    """Let drawn tokens follow a request's own, up to the one that ends it, and count them; the rest is dropped.

    Behind them the request's KV is complete but for the last one's, as after any step: that of drafts that were right
    is what it would have been.
    """
    request = run.request
    ledger.computed(request, run.first_position, run.num_tokens)
    answer, reason = _up_to_the_end(request, drawn, context_length)
    ledger.sampled(request, len(answer))
    if run.draft_tokens:
        ledger.drafted(request, len(run.draft_tokens), min(len(drawn) - 1, len(answer)))
    output = ledger.output(request, answer, reason, is_last=reason is not None)
    request.token_ids.extend(token.token_id for token in answer)
    request.num_computed_tokens = request.num_tokens - 1
    return output, reason


def first_tokens(
    request: Request, drawn: Sequence[Sampled], context_length: int, ledger: Ledger
) -> list[RequestOutput]:
    """Return the first tokens of a prefill that is done, one per choice, and count them."""
    ledger.sampled(request, num_choices=len(drawn))
    reasons = [request.finish_reason_with((token.token_id,), context_length) for token in drawn]
    return [
        ledger.output(request, (token,), reason, choice_index=index, is_last=True)
        for index, (token, reason) in enumerate(zip(drawn, reasons, strict=True))
    ]


def _up_to_the_end(
    request: Request, drawn: Sequence[Sampled], context_length: int
) -> tuple[Sequence[Sampled], FinishReason | None]:
    token_ids: list[int] = []
    for token in drawn:
        token_ids.append(token.token_id)
        if reason := request.finish_reason_with(token_ids, context_length):
            return drawn[: len(token_ids)], reason
    return drawn, None

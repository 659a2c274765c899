"""Applies sampled tokens to requests, and builds the outputs that report them."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_engine.messages import FinishReason, RequestOutput
from tandem_engine.scheduling.batch import ScheduledRun
from tandem_engine.scheduling.ledger import Ledger
from tandem_engine.scheduling.request import Request, Sampled


def take_tokens(
    run: ScheduledRun, sampled: Sequence[Sampled], context_length: int, ledger: Ledger
) -> tuple[RequestOutput, FinishReason | None]:
    """Append sampled tokens to a request, up to the token that ends it, and count them; drop the rest.

    The KV of all tokens but the last exists then, as after any step: the KV of accepted drafts is the same as without
    drafts.
    """
    request = run.request
    ledger.computed(request, run.first_position, run.num_tokens)
    answer, reason = _up_to_the_end(request, sampled, context_length)
    ledger.sampled(request, len(answer))
    if run.draft_tokens:
        ledger.drafted(request, len(run.draft_tokens), min(len(sampled) - 1, len(answer)))
    output = ledger.output(request, answer, reason, is_last=reason is not None)
    request.token_ids.extend(token.token_id for token in answer)
    request.num_computed_tokens = request.num_tokens - 1
    return output, reason


def first_tokens(
    request: Request, sampled: Sequence[Sampled], context_length: int, ledger: Ledger
) -> list[RequestOutput]:
    """Return the first tokens of a finished prefill, one per choice, and count them."""
    ledger.sampled(request, num_choices=len(sampled))
    reasons = [request.finish_reason_with((token.token_id,), context_length) for token in sampled]
    return [
        ledger.output(request, (token,), reason, choice_index=index, is_last=True)
        for index, (token, reason) in enumerate(zip(sampled, reasons, strict=True))
    ]


def _up_to_the_end(
    request: Request, sampled: Sequence[Sampled], context_length: int
) -> tuple[Sequence[Sampled], FinishReason | None]:
    token_ids: list[int] = []
    for token in sampled:
        token_ids.append(token.token_id)
        if reason := request.finish_reason_with(token_ids, context_length):
            return sampled[: len(token_ids)], reason
    return sampled, None

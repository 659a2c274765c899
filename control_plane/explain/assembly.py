"""Makes an explanation from a journal: segments, phases, moves, route and cost.

A worker's own stretches come from its ledger as durations of the worker's clock. What lies between gateway and worker
is the rest of a window that the gateway measured, so clocks that differ do no harm. Only the split of that rest, into
the way there and the way back, uses both clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from control_plane.explain.explanation import (
    AdmissionExplanation,
    Attempt,
    ClassCrossing,
    Explanation,
    GrantExplanation,
    Move,
    PhaseName,
    PhaseSpan,
    ProcessName,
    RouteExplanation,
    Segment,
    SegmentName,
    Summary,
    Texts,
    UsageExplanation,
)
from control_plane.explain.history import Call, PartEncoded
from control_plane.explain.journal import Journal
from control_plane.explain.timeline import Timeline

_MAX_PHASES = 24
_MAX_MOVES = 16
_MAX_TEXT_TOKENS = 4_096
"""Of each text: a document has 16 KiB at most."""
_NO_USAGE = UsageExplanation()
_TEXT_PROCESS = frozenset({"text"})


def explanation_of(journal: Journal, gateway: str, *, with_texts: bool = False) -> Explanation:
    """Return all that is known of a request; of a running one so far."""
    closing = journal.closing
    route = _route(journal)
    return Explanation(
        summary=summary_of(journal),
        requested_model=journal.requested_model,
        finish_reasons=tuple(closing.finish_reasons.split()) if closing is not None else (),
        trace_id=f"{journal.span.trace_id:032x}" if journal.span.trace_id else "",
        gateway=gateway,
        segments=segments_of(journal),
        phases=_phases(journal),
        admission=_admission(journal, is_local=route is not None and route.mode == "local"),
        route=route,
        moves=_moves(journal),
        usage=_usage(closing.usage) if closing is not None else _NO_USAGE,
        prompt_blocks=journal.history.prompt_blocks,
        session=journal.history.session,
        texts=_texts(journal) if with_texts else None,
    )


def _texts(journal: Journal) -> Texts | None:
    """Return the beginnings of prompt and answers."""
    prompt = journal.prompt
    if prompt is None:
        return None
    answers = [choice.tokens[: min(choice.num_delivered, _MAX_TEXT_TOKENS)] for choice in journal.history.choices[:8]]
    return Texts(prompt.beginning(_MAX_TEXT_TOKENS), "\n\n".join(prompt.decoded(tokens) for tokens in answers))


def summary_of(journal: Journal) -> Summary:
    """Return the row of a request in the list; of a running one so far."""
    timeline, history, closing = journal.timeline, journal.history, journal.closing
    ttft, prefill, decode = journal.ttft_seconds, "", ""
    for call in history.calls:
        if call.is_prefill:
            prefill = call.worker_id
        else:
            decode = call.worker_id
    if history.parts:
        decode = history.parts[-1].worker_id
    usage = None if closing is None else closing.usage
    is_counted = usage is not None or journal.ended_at is not None
    return Summary(
        id=journal.request_id,
        account=journal.account,
        model=journal.model,
        operation=journal.operation,
        state=journal.state,
        started_ms=int(timeline.started_unix * 1000),
        ttft_ms=None if ttft is None else 1000 * ttft,
        duration_ms=1000 * ((journal.ended_at or time.perf_counter()) - timeline.started),
        prompt_tokens=usage.num_prompt_tokens if usage else 0 if is_counted else journal.num_prompt_tokens,
        cached_tokens=usage.num_cached_tokens if usage else 0,
        completion_tokens=usage.num_completion_tokens if usage else 0 if is_counted else history.num_delivered,
        prefill=prefill,
        decode=decode,
        error=closing.error if closing is not None else journal.error if journal.state in ("failed", "aborted") else "",
    )


def _usage(used: Any) -> UsageExplanation:
    work = used.work
    return UsageExplanation(
        prompt_tokens=used.num_prompt_tokens,
        computed_tokens=used.num_computed_tokens,
        cached_tokens=used.num_cached_tokens,
        pool_tokens=used.num_pool_tokens,
        store_tokens=work.num_store_tokens,
        remote_tokens=work.num_remote_tokens,
        completion_tokens=used.num_completion_tokens,
        reprefill_tokens=work.num_reprefill_tokens,
        bytes_moved=work.num_bytes_moved,
        prefill_us=work.prefill_us,
        decode_us=work.decode_us,
        microneurons=used.microneurons or 0,
        seams=used.num_seams,
    )


# ------------------------------------------------------------------------------------------------------- critical path


class _Path:
    """Segments without gaps, from the request's head on."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self.at = origin
        self.segments: list[Segment] = []

    def to(self, end: float | None, name: str, process: ProcessName = "gateway", worker: str = "") -> None:
        """Add a segment up to `end`; none if the path is there already."""
        if end is None or end <= self.at:
            return
        start = self.at
        if self.segments and self.segments[-1].name == name and self.segments[-1].worker == worker:
            last = self.segments.pop()
            start = self._origin + last.start_ms / 1000
        begins, lasts = 1000 * (start - self._origin), 1000 * (end - start)
        self.segments.append(Segment(cast(SegmentName, name), process, begins, lasts, worker))
        self.at = end


def segments_of(journal: Journal) -> list[Segment]:
    """Return the critical path of the first token as far as the request has come."""
    timeline, history = journal.timeline, journal.history
    path = _shared_path(timeline)
    path.to(journal.admitted_at, "limits")
    call = history.first_call
    for lap in history.laps.laps:
        if call is not None and lap.ended_at > call.sent_at:
            break
        path.to(lap.ended_at, lap.name, "prefill" if lap.worker else "gateway", lap.worker)
    if history.parts:
        _add_encoding(path, max(history.parts, key=lambda part: part.replied_at), journal)
        path.to(journal.ended_at, "detokenize")
        return path.segments
    if call is not None:
        _add_first_token(path, call, journal)
    for lap in history.laps.laps:  # of an attempt whose other worker refused, although the first token was here
        path.to(_before(lap.ended_at, journal.text_at), lap.name, "prefill" if lap.worker else "gateway", lap.worker)
    path.to(_before(history.accepted_at, journal.text_at), "submit")
    path.to(journal.opened_at, "limits")
    path.to(journal.text_at, "detokenize")
    if journal.text_at is not None:
        path.to(timeline.written_at, "write")
    return path.segments


def shared_segments(timeline: Timeline) -> list[Segment]:
    """Return the part of the path that all prompts of an HTTP request share."""
    return _shared_path(timeline).segments


def _shared_path(timeline: Timeline) -> _Path:
    path = _Path(timeline.started)
    for lap in timeline.laps.laps:
        path.to(lap.ended_at, lap.name, "text" if lap.name in _TEXT_PROCESS else "gateway")
    return path


def _before(moment: float | None, limit: float | None) -> float | None:
    return moment if moment is None or limit is None or moment <= limit else None


def _add_first_token(path: _Path, call: Call, journal: Journal) -> None:
    """Add what happened from the call's start until its first token was here."""
    if call.sent_at > path.at:
        lost = [move for move in journal.history.moves if path.at <= move.began_at < call.sent_at]
        path.to(call.sent_at, "prefill" if lost else "submit", "gateway", lost[-1].from_worker if lost else "")
    end = call.output_at or path.at
    call = _prompt_call(call, journal)
    process: ProcessName = "prefill" if call.is_prefill else "decode"
    stretches = _stretches(call, path.at, end, journal)
    if stretches is None:
        path.to(_before(call.accepted_at, end), "submit")
        path.to(end, "prefill", process, call.worker_id)
        return
    path.to(path.at + stretches.there, "submit")
    path.to(path.at + stretches.queue, "worker_queue", process, call.worker_id)
    path.to(path.at + stretches.work, "prefill", process, call.worker_id)
    path.to(end, "transport")


def _prompt_call(first: Call, journal: Journal) -> Call:
    """Return the call that computed the prompt. `first`: the one whose first token came first.

    A decode worker that pulled the prompt's cache repeats the first token, and may be here sooner than prefill.
    """
    if first.is_prefill or first.ledger is None or not first.ledger.transfer_end_ns:
        return first
    prefills = [each for each in journal.history.calls if each.is_prefill and each.ledger is not None]
    return prefills[-1] if prefills else first


def _add_encoding(path: _Path, part: PartEncoded, journal: Journal) -> None:
    """Add the texts that were answered last: what they waited for, and how long their worker took."""
    path.to(part.sent_at, "queue")
    ledger = part.ledger
    stretches = _split(
        path.at,
        part.replied_at,
        (ledger.submitted_ns, ledger.scheduled_ns, ledger.finished_ns),
        journal,
    )
    path.to(path.at + stretches.there, "submit")
    path.to(path.at + stretches.queue, "worker_queue", "encode", part.worker_id)
    path.to(path.at + stretches.work, "prefill", "encode", part.worker_id)
    path.to(part.replied_at, "transport")


class _Stretches(NamedTuple):
    """Seconds of a window: the way to the worker, its queue, its work. The way back is the rest."""

    there: float
    queue: float
    work: float


def _stretches(call: Call, begin: float, end: float, journal: Journal) -> _Stretches | None:
    """Return the parts of a call up to its first token; None if its worker has not reported them."""
    ledger = call.ledger
    if ledger is None or not (ledger.submitted_ns and ledger.scheduled_ns and ledger.first_token_ns):
        return None
    return _split(begin, end, (ledger.submitted_ns, ledger.scheduled_ns, ledger.first_token_ns), journal)


def _split(begin: float, end: float, times_ns: tuple[int, int, int], journal: Journal) -> _Stretches:
    """Split a window of the gateway by three times of the worker: it has the request, begins, and is done."""
    had_ns, began_ns, done_ns = times_ns
    window = max(0.0, end - begin)
    queue, work = max(0, began_ns - had_ns) / 1e9, max(0, done_ns - began_ns) / 1e9
    if queue + work > window:  # the worker's clock was set meanwhile
        scale = window / (queue + work)
        queue, work = queue * scale, work * scale
    timeline = journal.timeline
    there = had_ns / 1e9 - (timeline.started_unix + begin - timeline.started)
    return _Stretches(min(max(0.0, there), window - queue - work), queue, work)


# --------------------------------------------------------------------------------------------------- the whole request


class _Placed:
    """Places the times of a worker's ledger on the gateway's clock."""

    def __init__(self, call: Call, journal: Journal) -> None:
        assert call.ledger is not None, "only calls with a ledger are placed"
        self.ledger = call.ledger
        self._origin = journal.timeline.started
        end = call.output_at or journal.ended_at or time.perf_counter()
        stretches = _stretches(call, call.sent_at, end, journal)
        self._had_at = call.sent_at + (stretches.there if stretches is not None else 0.0)

    def phase(self, name: PhaseName, worker: str, start_ns: int, end_ns: int, num_tokens: int = 0) -> PhaseSpan:
        return PhaseSpan(name, worker, self.ms(start_ns), (end_ns - start_ns) / 1e6, num_tokens)

    def ms(self, time_ns: int) -> float:
        """Return the milliseconds since the request's head."""
        return 1000 * (self._had_at - self._origin) + (time_ns - self.ledger.submitted_ns) / 1e6


def _phases(journal: Journal) -> list[PhaseSpan]:
    """Return the waterfall, in the order that phases began."""
    phases = [*_gateway_phases(journal), *_encode_phases(journal)]
    for call in journal.history.calls:
        if len(phases) >= _MAX_PHASES:
            break
        phases += _call_phases(call, journal)
    return sorted(phases, key=lambda phase: phase.start_ms)[:_MAX_PHASES]


def _gateway_phases(journal: Journal) -> Iterator[PhaseSpan]:
    origin, begin = journal.timeline.started, journal.timeline.started
    for lap in journal.timeline.laps.laps:
        if lap.name in _TEXT_PROCESS:
            num = journal.num_prompt_tokens
            yield PhaseSpan("text", "", 1000 * (begin - origin), 1000 * (lap.ended_at - begin), num)
        begin = lap.ended_at
    begin = journal.admitted_at or begin
    for lap in journal.history.laps.laps[:8]:
        if lap.name in ("queue", "route"):
            name = cast(PhaseName, lap.name)
            yield PhaseSpan(name, "", 1000 * (begin - origin), 1000 * (lap.ended_at - begin))
        begin = lap.ended_at


def _encode_phases(journal: Journal) -> Iterator[PhaseSpan]:
    origin = journal.timeline.started
    for part in journal.history.parts:
        ledger = part.ledger
        times = ledger.submitted_ns, ledger.scheduled_ns, ledger.finished_ns
        found = _split(part.sent_at, part.replied_at, times, journal)
        start = 1000 * (part.sent_at + found.there + found.queue - origin)
        yield PhaseSpan("encode", part.worker_id, start, 1000 * found.work, part.num_tokens)


def _call_phases(call: Call, journal: Journal) -> Iterator[PhaseSpan]:
    ledger, worker = call.ledger, call.worker_id
    if ledger is None or not ledger.submitted_ns or not ledger.scheduled_ns:
        yield from _unreported_phases(call, journal)
        return
    placed = _Placed(call, journal)
    has_pulled = bool(ledger.transfer_start_ns and ledger.transfer_end_ns)
    if has_pulled:
        start, end = ledger.transfer_start_ns, ledger.transfer_end_ns
        yield placed.phase("hand_over", worker, start, end, _num_handed_over(ledger))
    ready_ns = max(ledger.submitted_ns, ledger.transfer_end_ns if has_pulled else 0)
    if ledger.scheduled_ns > ready_ns:
        yield placed.phase("queue", worker, ready_ns, ledger.scheduled_ns)
    finished_ns, first_ns = ledger.finished_ns, ledger.first_token_ns
    if call.is_prefill:
        yield placed.phase(
            "prefill",
            worker,
            ledger.scheduled_ns,
            first_ns or finished_ns or ledger.scheduled_ns,
            _num_computed(ledger),
        )
        return
    decodes_from = ledger.scheduled_ns
    if ledger.num_computed_tokens and first_ns:
        yield placed.phase("prefill", worker, ledger.scheduled_ns, first_ns, _num_computed(ledger))
        decodes_from = first_ns
    if finished_ns > decodes_from:
        yield placed.phase("decode", worker, decodes_from, finished_ns, ledger.num_generated_tokens)


def _unreported_phases(call: Call, journal: Journal) -> Iterator[PhaseSpan]:
    """Yield what the gateway saw of a call that runs, was cancelled or was lost."""
    origin, now = journal.timeline.started, call.closed_at or journal.ended_at or time.perf_counter()
    until = call.output_at or now
    first: PhaseName = "prefill" if call.is_prefill or call is journal.history.first_call else "queue"
    yield PhaseSpan(first, call.worker_id, 1000 * (call.sent_at - origin), 1000 * max(0.0, until - call.sent_at))
    if not call.is_prefill and until < now:
        yield PhaseSpan("decode", call.worker_id, 1000 * (until - origin), 1000 * (now - until))


def _num_computed(ledger: Any) -> int:
    return int(ledger.num_computed_tokens)


def _num_handed_over(ledger: Any) -> int:
    return max(0, int(ledger.num_prompt_tokens) - int(ledger.num_reprefill_tokens))


def _moves(journal: Journal) -> list[Move]:
    """Return hand-overs, migrations and restarts in the order that they began."""
    origin, crossings = journal.timeline.started, _crossings(journal)
    moves = [
        Move(
            kind=move.kind,
            time_ms=1000 * (move.began_at - origin),
            from_worker=move.from_worker,
            to_worker=move.to_worker,
            why=move.why,
            num_tokens=move.num_tokens,
            duration_ms=1000 * (move.ended_at - move.began_at),
            seam=crossings.get((move.to_worker, move.num_tokens - journal.num_prompt_tokens)),
        )
        for move in journal.history.moves
    ]
    moves += _hand_overs(journal, crossings)
    return sorted(moves, key=lambda move: move.time_ms)[:_MAX_MOVES]


def _crossings(journal: Journal) -> dict[tuple[str, int], ClassCrossing]:
    """Return the seams of all choices, by the worker and the position at which the other class begins."""
    return {
        (seam.after.worker_id, seam.position): ClassCrossing(
            seam.position, seam.before.numerics_class, seam.after.numerics_class
        )
        for seam in journal.history.seams
    }


def _hand_overs(journal: Journal, crossings: Mapping[tuple[str, int], ClassCrossing]) -> Iterator[Move]:
    calls = journal.history.calls
    prefill = next((call.worker_id for call in reversed(calls) if call.is_prefill), "")
    for call in calls:
        ledger = call.ledger
        if call.is_prefill or ledger is None or not (ledger.transfer_start_ns and ledger.transfer_end_ns):
            continue
        yield Move(
            kind="hand_over",
            time_ms=_Placed(call, journal).ms(ledger.transfer_start_ns),
            from_worker=prefill,
            to_worker=call.worker_id,
            why="route",
            num_bytes=ledger.num_bytes_pulled,
            num_tokens=_num_handed_over(ledger),
            duration_ms=max(0, ledger.transfer_end_ns - ledger.transfer_start_ns) / 1e6,
            transport=ledger.transport,
            seam=crossings.get((call.worker_id, 1)),  # after prefill's token
        )


def _admission(journal: Journal, *, is_local: bool) -> AdmissionExplanation | None:
    """`is_local`: decode computed the prompt, perhaps after a prefill worker had accepted it too."""
    found = journal.history.standing
    if found is None:
        return None
    return AdmissionExplanation(
        found.service_class,
        found.predicted_wait_ms,
        found.num_waiting,
        found.cost_ms,
        found.used_ms,
        grant=_grant(journal, is_prefill=False),
        prefill_grant=None if is_local else _grant(journal, is_prefill=True),
        num_waiting_elsewhere=found.num_waiting_elsewhere,
    )


def _grant(journal: Journal, *, is_prefill: bool) -> GrantExplanation | None:
    """Return what was granted for the first call of a role that was accepted."""
    calls = (call for call in journal.history.calls if call.is_prefill == is_prefill and call.accepted_at is not None)
    call = next(calls, None)
    left = call.grant if call is not None else None
    return GrantExplanation(left.number, left.num_tokens, left.num_requests) if left is not None else None


def _route(journal: Journal) -> RouteExplanation | None:
    history = journal.history
    if not history.attempts:
        return None
    attempts = [
        Attempt(each.number, each.route.prefill_id, each.route.decode_id, each.outcome) for each in history.attempts
    ]
    return _with_actual_worker(history.attempts[-1].route.explained(), attempts, history.calls)


def _with_actual_worker(
    route: RouteExplanation, attempts: Sequence[Attempt], calls: Sequence[Call]
) -> RouteExplanation:
    """Name the decode worker that took the request: the route's next one, if the first refused."""
    decode = next(
        (call.worker_id for call in calls if not call.is_prefill and call.output_at is not None), route.decode
    )
    return replace(route, attempts=attempts, decode=decode)

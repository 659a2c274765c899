"""Collects the spans of each request from all processes."""

from __future__ import annotations

from collections.abc import Sequence, Set

from benchmarks.lib.stats import STEPS, Answer, Interval, Trace
from tests.otlp_sink import OtlpSink, ReceivedSpan

_WHOLE = "(the whole request)"
AGGREGATED_STEPS = frozenset({"tokenize", "route", "decode.queue", "decode.first_token", "decode.stream"})
_HAND_OVER_STEPS = frozenset(STEPS) - AGGREGATED_STEPS


async def traces_of(sink: OtlpSink, answers: Sequence[Answer], *, handed_over: bool) -> list[Trace]:
    """Wait until the spans of all these requests have come from every process, and return a trace for each.

    Raises RuntimeError unless each request was handed over, or none was: a fleet whose prefill worker is not there
    answers all the same, and its figures would go by the wrong name.
    """
    wanted = frozenset(STEPS) if handed_over else AGGREGATED_STEPS
    try:
        await sink.wait_for(lambda sink: not _unfinished(sink, answers, wanted))
    except TimeoutError as error:
        num_unfinished = len(_unfinished(sink, answers, wanted))
        raise RuntimeError(
            f"{num_unfinished} of {len(answers)} requests lack spans of {', '.join(sorted(wanted))}; they did not go "
            f"the way that is measured: look into the services' logs (attempts refused, pulls failed?)"
        ) from error
    traces = [trace_from(sink.trace(answer.trace_id)) for answer in answers]
    if not handed_over and any(_HAND_OVER_STEPS & trace.steps.keys() for trace in traces):
        raise RuntimeError("an aggregated arrangement has handed requests over; is its --prefill 0?")
    return traces


def _unfinished(sink: OtlpSink, answers: Sequence[Answer], wanted: Set[str]) -> list[Answer]:
    names: dict[str, set[str]] = {answer.trace_id: set() for answer in answers}
    for span in sink.spans:
        if span.trace_id in names:
            names[span.trace_id].add(_WHOLE if _is_whole(span) else span.name)
    return [answer for answer in answers if not wanted | {_WHOLE} <= names[answer.trace_id]]


def trace_from(spans: Sequence[ReceivedSpan]) -> Trace:
    """Sort one request's spans by step; a step that was repeated on another worker counts with its last span."""
    whole = next(span for span in spans if _is_whole(span))
    return Trace(_interval(whole), {span.name: _interval(span) for span in spans if span.name in STEPS})


def _is_whole(span: ReceivedSpan) -> bool:
    """Whether it is the gateway's span around everything; only that one knows the route."""
    return "http.route" in span.attributes


def _interval(span: ReceivedSpan) -> Interval:
    return span.start_ns / 1e9, span.end_ns / 1e9

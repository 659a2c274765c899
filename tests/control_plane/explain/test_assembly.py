"""Segments are one path without gaps, whatever clocks say and whatever happened to the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from control_plane.accounts.ledger import Closing
from control_plane.admission.attachment import GrantLeft
from control_plane.explain.explanation import CachedTokens, Candidate, ClassCrossing, Explanation, RouteExplanation
from control_plane.explain.history import History, Standing
from control_plane.explain.journal import Journal
from control_plane.explain.prompt_blocks import PromptBlocks
from control_plane.explain.requests import Requests
from control_plane.explain.server_timing import server_timing
from control_plane.explain.store import MAX_DOCUMENT_BYTES, document_of
from control_plane.explain.timeline import Timeline
from control_plane.generation import PhaseWork, Usage
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Overloaded, Unavailable

USED = Usage(10, 8, 2, 5, PhaseWork(num_bytes_moved=400), 7)


@dataclass(eq=False)
class Call:
    worker_id: str
    is_prefill: bool
    sent_at: float
    accepted_at: float | None = None
    output_at: float | None = None
    closed_at: float | None = None
    ledger: pb.PhaseLedger | None = None
    grant: GrantLeft | None = None


@dataclass(eq=False)
class Choice:
    tokens: Sequence[int] = ()
    num_delivered: int = 0


@dataclass
class Route:
    prefill_id: str = "prefill-0"
    decode_id: str = "decode-0"
    candidates: list[Candidate] = field(default_factory=list)

    def explained(self) -> RouteExplanation:
        mode = "handed_over" if self.prefill_id else "local"
        return RouteExplanation(mode, self.prefill_id, self.decode_id, "the test's", candidates=self.candidates)  # type: ignore[arg-type]


def ledger(had_at: float, queue: float, work: float, *, skew: float = 0.0, **more: int | str) -> pb.PhaseLedger:
    """Return a ledger of a worker whose clock is ahead by `skew` seconds; `had_at` is Unix time."""
    had_ns = int((had_at + skew) * 1e9)
    times = {"scheduled_ns": had_ns + int(queue * 1e9), "first_token_ns": had_ns + int((queue + work) * 1e9)}
    return pb.PhaseLedger(submitted_ns=had_ns, **times, **more)  # type: ignore[arg-type]


def opened(requests: Requests) -> Journal:
    """Return a journal whose request is at its workers; its head came a second ago."""
    timeline = Timeline(time.perf_counter() - 1.0)
    timeline.end("body")
    timeline.text_begun()
    timeline.end("text")
    journal = requests.open(timeline, "r-1", "me", "chat")
    journal.model_found("demo", "demo")
    journal.prepared(History(), 10)
    journal.admitted()
    return journal


def told(journal: Journal, call: Call, seconds: float) -> None:
    """Bring the first token `seconds` after the call was sent, and the text a moment later."""
    call.output_at = call.sent_at + seconds
    journal.history.output_began(call)
    journal.history.accepted_at = journal.opened_at = call.sent_at + seconds / 10
    journal.text_at = call.output_at + 0.002
    journal.ended_at = call.output_at + 0.1
    journal.closed(Closing("r-1", "finished", USED, "stop"))


def explained(journal: Journal) -> Explanation:
    assert journal.explanation is not None
    return journal.explanation


def durations(explanation: Explanation) -> dict[str, float]:
    return {segment.name: segment.duration_ms for segment in explanation.segments}


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0, 0.004])
def test_a_workers_clock_changes_no_sum_and_none_of_its_own_durations(skew: float) -> None:
    journal = opened(Requests())
    journal.history.routed(0, Route())
    now = journal.history.laps.laps[-1].ended_at
    unix = journal.timeline.started_unix + now - journal.timeline.started
    call = Call("prefill-0", True, now, ledger=ledger(unix + 0.003, 0.010, 0.020, skew=skew))
    journal.history.called(call)
    told(journal, call, 0.040)
    found = explained(journal)
    names = [segment.name for segment in found.segments]
    assert names[-3:] == ["prefill", "transport", "detokenize"] or names[-2:] == ["prefill", "detokenize"]
    assert abs(found.unexplained_ms) < 0.001
    parts = durations(found)
    assert (parts["worker_queue"], parts["prefill"]) == pytest.approx((10.0, 20.0), abs=0.01)
    between = parts.get("submit", 0.0) + parts.get("transport", 0.0)
    assert between == pytest.approx(10.0, abs=0.01), "the rest of the window is the way there and back"
    if abs(skew) < 1e-9:
        assert parts["submit"] == pytest.approx(3.0, abs=0.1)


def test_a_ledger_that_is_longer_than_the_window_is_scaled_into_it() -> None:
    journal = opened(Requests())
    journal.history.routed(0, Route())
    call = Call("prefill-0", True, time.perf_counter(), ledger=ledger(time.time(), 3.0, 1.0))
    journal.history.called(call)
    told(journal, call, 0.040)
    parts = durations(explained(journal))
    assert (parts["worker_queue"], parts["prefill"]) == pytest.approx((30.0, 10.0), abs=0.01)
    assert abs(explained(journal).unexplained_ms) < 0.001


def test_without_a_ledger_the_time_at_the_worker_is_prefill_after_its_acceptance() -> None:
    journal = opened(Requests())
    journal.history.routed(0, Route(prefill_id=""))
    call = Call("decode-0", False, time.perf_counter())
    call.accepted_at = call.sent_at + 0.010
    journal.history.called(call)
    told(journal, call, 0.040)
    parts = durations(explained(journal))
    assert (parts["submit"], parts["prefill"]) == pytest.approx((10.0, 30.0), abs=0.5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_decode_worker_whose_first_token_overtakes_prefills_is_not_named_for_prefills_time(recomputes: bool) -> None:
    journal = opened(Requests())
    journal.history.routed(0, Route())
    now, unix = time.perf_counter(), time.time()
    decode = Call("decode-0", False, now, ledger=ledger(unix + 0.003, 0.031, 0.001))
    assert decode.ledger is not None
    decode.ledger.transfer_end_ns = 0 if recomputes else decode.ledger.scheduled_ns
    prefill = Call("prefill-0", True, now, ledger=ledger(unix + 0.003, 0.010, 0.020))
    for call in (decode, prefill):
        journal.history.called(call)
    told(journal, decode, 0.040)
    found = explained(journal)
    work = [segment for segment in found.segments if segment.name in ("worker_queue", "prefill")]
    assert abs(found.unexplained_ms) < 0.001
    if recomputes:
        assert {segment.worker for segment in work} == {"decode-0"}
        return
    assert {(segment.process, segment.worker) for segment in work} == {("prefill", "prefill-0")}
    assert [segment.duration_ms for segment in work] == pytest.approx([10.0, 20.0], abs=0.1)


def test_waits_and_refused_attempts_are_segments_of_their_own() -> None:
    journal = opened(Requests())
    history = journal.history
    history.routed(0, Route())
    history.refused(Overloaded("full"))
    history.waits()
    history.waited()
    history.routed(1, Route("prefill-1"))
    call = Call("prefill-1", True, time.perf_counter(), ledger=ledger(time.time(), 0.001, 0.002))
    history.called(call)
    told(journal, call, 0.010)
    found = explained(journal)
    names = [segment.name for segment in found.segments]
    assert names[3:9] == ["limits", "route", "submit", "route", "queue", "route"]
    assert abs(found.unexplained_ms) < 0.001 and found.route is not None
    outcomes = [(attempt.attempt, attempt.prefill, attempt.outcome) for attempt in found.route.attempts]
    assert outcomes[0] == (0, "prefill-0", "Overloaded") and outcomes[1][:2] == (1, "prefill-1")


def test_a_request_that_waits_for_ever_keeps_a_bounded_history() -> None:
    journal = opened(Requests())
    for number in range(3_000):
        journal.history.routed(number, Route())
        journal.history.refused(Overloaded("full"))
        journal.history.waits()
        journal.history.waited()
        journal.history.moved("migration", 0.0, ("a", "b"), Unavailable("lost"), 1)
        journal.history.called(Call("decode-0", False, time.perf_counter()))
    journal.failed(Overloaded("full"))
    journal.closed(Closing("r-1", "failed", Usage(0, 0, 0, 0), error="Overloaded"))
    found = explained(journal)
    assert len(found.segments) <= 40 and len(found.moves) <= 16 and len(found.phases) <= 24
    assert found.route is not None and len(found.route.attempts) == 8
    assert found.route.attempts[-1].attempt == 2_999
    assert len(document_of(found)) <= MAX_DOCUMENT_BYTES


def test_the_time_at_a_lost_worker_is_its_segment() -> None:
    journal = opened(Requests())
    history = journal.history
    history.routed(0, Route("prefill-0"))
    history.accepted()
    lost_at = time.perf_counter()
    history.restarts("prefill-0")
    assert journal.state == "queued"
    history.routed(1, Route("prefill-1"))
    call = Call("prefill-1", True, time.perf_counter(), ledger=ledger(time.time(), 0.001, 0.002))
    history.called(call)
    history.moved("restart", lost_at, ("prefill-0", "prefill-1"), Unavailable("lost"), 10)
    told(journal, call, 0.010)
    found = explained(journal)
    lost = [segment for segment in found.segments if segment.worker == "prefill-0"]
    assert [segment.name for segment in lost] == ["prefill"] and abs(found.unexplained_ms) < 0.001
    (move,) = found.moves
    assert (move.kind, move.why) == ("restart", "Unavailable")
    assert (move.from_worker, move.to_worker) == ("prefill-0", "prefill-1")


def test_a_choice_that_moves_before_its_first_token_has_the_time_at_the_lost_worker() -> None:
    journal = opened(Requests())
    history = journal.history
    history.routed(0, Route(prefill_id=""))
    lost_at = time.perf_counter()
    call = Call("decode-1", False, lost_at + 0.020, ledger=ledger(time.time(), 0.001, 0.002))
    history.called(call)
    history.moved("migration", lost_at, ("decode-0", "decode-1"), Unavailable("lost"), 10)
    told(journal, call, 0.010)
    found = explained(journal)
    (lost,) = [segment for segment in found.segments if segment.worker == "decode-0"]
    assert lost.name == "prefill" and lost.duration_ms == pytest.approx(20.0, abs=1.0)
    assert abs(found.unexplained_ms) < 0.001


def test_a_hand_over_is_a_move_with_its_bytes_and_a_phase() -> None:
    journal = opened(Requests())
    history = journal.history
    history.routed(0, Route())
    now = time.perf_counter()
    prefill = Call("prefill-0", True, now, ledger=ledger(time.time(), 0.001, 0.002, num_computed_tokens=8))
    pulled = ledger(time.time(), 0.004, 0.001, num_prompt_tokens=10, num_bytes_pulled=400, transport="shm")
    pulled.transfer_start_ns, pulled.transfer_end_ns = pulled.submitted_ns, pulled.submitted_ns + 3_000_000
    pulled.finished_ns, pulled.num_generated_tokens = pulled.submitted_ns + 50_000_000, 4
    decode = Call("decode-0", False, now, ledger=pulled)
    history.called(decode)
    history.called(prefill)
    told(journal, prefill, 0.005)
    found = explained(journal)
    (move,) = found.moves
    assert (move.kind, move.from_worker, move.to_worker, move.why) == ("hand_over", "prefill-0", "decode-0", "route")
    assert (move.num_bytes, move.num_tokens, move.transport) == (400, 10, "shm")
    assert move.duration_ms == pytest.approx(3.0)
    names = {(phase.name, phase.worker): phase.num_tokens for phase in found.phases}
    assert names[("prefill", "prefill-0")] == 8 and names[("decode", "decode-0")] == 4
    assert ("hand_over", "decode-0") in names and ("text", "") in names


def test_the_move_that_crosses_numerics_classes_says_so() -> None:
    journal = opened(Requests())
    history = journal.history
    now = time.perf_counter()
    history.routed(0, Route())
    pulled = ledger(time.time(), 0.004, 0.001, num_prompt_tokens=10)
    pulled.transfer_start_ns, pulled.transfer_end_ns = pulled.submitted_ns, pulled.submitted_ns + 3_000_000
    history.called(Call("prefill-0", True, now))
    history.called(Call("decode-0", False, now, ledger=pulled))
    history.moved("migration", now, ("decode-0", "decode-1"), Unavailable("lost"), 10 + 5)
    history.moved("migration", now + 1.0, ("decode-1", "decode-2"), Unavailable("lost"), 10 + 8)
    history.choices = [Choice(num_delivered=20)]
    one, other = (pb.Fingerprint(numerics_class=name) for name in ("one", "other"))
    runs = (0, "prefill-0", one), (1, "decode-0", other), (5, "decode-1", other), (8, "decode-2", one)
    for position, worker, fingerprint in runs:
        history.classes.begin(0, position, worker, fingerprint)
    told(journal, Call("decode-2", False, now), 0.010)
    found = {move.to_worker: move.seam for move in explained(journal).moves}
    assert found == {
        "decode-0": ClassCrossing(1, "one", "other"),
        "decode-1": None,
        "decode-2": ClassCrossing(8, "other", "one"),
    }


def test_the_list_and_the_explanation_of_a_running_request_have_what_is_known() -> None:
    requests = Requests("gateway-1")
    journal = opened(requests)
    assert requests.num_by_model() == {("queued", "demo"): 1}
    journal.history.routed(0, Route())
    journal.history.called(Call("decode-0", False, time.perf_counter()))
    journal.history.accepted()
    journal.history.choices = [Choice((1, 2, 3), 2)]
    (row,) = requests.newest(10)
    assert (row["state"], row["completion_tokens"], row["prompt_tokens"]) == ("running", 2, 10)
    found = requests.find("r-1")
    assert found is not None and found.summary.decode == "decode-0" and found.gateway == "gateway-1"
    assert found.to_json()["prompt_blocks"] is None
    journal.history.prompt_blocks = PromptBlocks(512, b"8 bytes.")
    again = requests.find("r-1")
    assert again is not None
    assert again.to_json()["prompt_blocks"] == {"num_tokens": 512, "hashes": b"8 bytes.".hex()}
    journal.stopped()
    journal.closed(Closing("r-1", "cancelled", USED))
    assert requests.num_by_model() == {} and requests.num_ended() == 1
    assert requests.newest(10)[0]["state"] == "cancelled"


def test_an_http_request_that_ends_ends_the_prompts_that_never_began() -> None:
    requests = Requests()
    timeline = Timeline()
    first, second = (requests.open(timeline, request_id, "me", "text_completion") for request_id in ("a", "a-1"))
    first.admitted()
    timeline.left()
    assert second.state == "cancelled" and requests.num_running == 1, "the ledger's row ends the first one"
    first.closed(Closing("a", "finished", USED))
    timeline.left()
    assert requests.num_running == 0 and requests.num_ended() == 2


def test_a_listener_that_fails_harms_no_request() -> None:
    requests = Requests()
    heard: list[Explanation] = []

    def broken(explanation: Explanation) -> None:
        raise ValueError("a bug")

    requests.listen(broken)
    requests.listen(heard.append)
    requests.open(None, "r", "me", "chat").failed(Unavailable("no worker"))
    assert [each.summary.error for each in heard] == ["Unavailable"]


def test_server_timing_names_each_segment_once_and_ends_with_the_total() -> None:
    journal = opened(Requests())
    journal.history.routed(0, Route())
    journal.history.refused(Overloaded("full"))
    journal.history.routed(1, Route())
    parts = [part.split(";dur=") for part in server_timing(journal.timeline).split(", ")]
    assert [name for name, _ in parts] == ["body", "text_wait", "text", "limits", "route", "submit", "total"]
    assert float(parts[-1][1]) >= 1000.0


def test_a_document_stays_below_its_bound_and_texts_are_cut_first() -> None:
    requests = Requests(with_texts=True)
    journal = opened(requests)
    many = [Candidate("decode", f"decode-{n}" * 9, 1.0, 1.0, 0.0, 0.0, None, CachedTokens(1, 2, 3)) for n in range(60)]
    journal.history.routed(0, Route(candidates=many[:8]))
    journal.prompt = Texts("\x00é" * 30_000, "ok")
    journal.history.choices = [Choice((1,), 1)]
    journal.closed(Closing("r-1", "finished", USED))
    document = document_of(explained(journal))
    assert len(document) <= MAX_DOCUMENT_BYTES and b'"answer":"ok"' in document
    assert document.count(b'"role":"decode"') >= 8, "the texts gave way, and not the route"
    journal = opened(Requests())
    journal.history.routed(0, Route(candidates=many))
    journal.closed(Closing("r-1", "finished", USED))
    assert len(document_of(explained(journal))) <= MAX_DOCUMENT_BYTES


@dataclass
class Texts:
    prompt: str
    answer: str

    def beginning(self, max_tokens: int) -> str:
        return self.prompt

    def decoded(self, token_ids: Sequence[int]) -> str:
        return self.answer


def test_both_halves_show_what_their_workers_had_granted() -> None:
    journal = opened(Requests())
    journal.history.came(Standing("default", 0.0, 0, 1.0, 0.0))
    journal.history.routed(0, Route())
    now = time.perf_counter()
    refused = Call("prefill-1", True, now, grant=GrantLeft(9, 9, 9))
    prefill = Call("prefill-0", True, now, now, grant=GrantLeft(2, 500, 1))
    decode = Call("decode-0", False, now, now, grant=GrantLeft(17, 4096, 3))
    for call in (refused, prefill, decode):
        journal.history.called(call)
    told(journal, decode, 0.040)
    admission = explained(journal).to_json()["admission"]
    assert admission["grant"] == {"number": 17, "num_tokens": 4096, "num_requests": 3}
    assert admission["prefill_grant"] == {"number": 2, "num_tokens": 500, "num_requests": 1}

"""A prompt is sent only to a worker that is expected to take it."""

from __future__ import annotations

from dataclasses import replace

from control_plane.admission.attachment import Attachment, Grant
from control_plane.admission.worker_rooms import Report, WorkerRooms

REPORT = Report(num_free_tokens=1000, num_total_tokens=2000, tokens_per_block=10, num_live=4, max_running=8)


def rooms_with(report: Report = REPORT) -> WorkerRooms:
    rooms = WorkerRooms()
    rooms.reported("w", report)
    return rooms


def test_what_was_sent_since_the_report_counts_until_it_has_ended() -> None:
    rooms = rooms_with()
    assert rooms.has_room("w", 900)
    call = rooms.sent("w", 600)
    assert not rooms.has_room("w", 900) and rooms.has_room("w", 300)
    call.ended()
    call.ended()
    assert rooms.has_room("w", 900) and not rooms.has_room("w", 961), "each of four that run may take another block"


def test_a_report_has_the_calls_that_were_accepted_before_it() -> None:
    rooms = rooms_with()
    accepted, pending = rooms.sent("w", 500), rooms.sent("w", 400)
    accepted.accepted()
    rooms.reported("w", replace(REPORT, num_free_tokens=500, num_live=5))
    assert not rooms.has_room("w", 100), "500 - 400 that it has not answered - one block each for 6"
    pending.ended()
    assert rooms.has_room("w", 450)
    accepted.ended()
    assert rooms.has_room("w", 900), "what the report counted is free"


def test_a_worker_that_refused_is_full_until_something_ends_there_or_it_reports() -> None:
    rooms = rooms_with()
    running = rooms.sent("w", 100)
    running.accepted()
    rooms.sent("w", 100).refused()
    assert not rooms.has_room("w", 1, may_offer=True)
    running.ended()
    assert rooms.has_room("w", 1)
    rooms.sent("w", 100).refused()
    rooms.reported("w", REPORT)
    assert rooms.has_room("w", 1)


def test_a_refusal_that_crossed_with_an_end_is_not_believed() -> None:
    rooms = rooms_with()
    running, refused = rooms.sent("w", 100), rooms.sent("w", 100)
    running.ended()
    refused.refused()
    assert rooms.has_room("w", 1)


def test_a_pool_that_seems_full_is_offered_one_request_between_two_reports() -> None:
    full = replace(REPORT, num_free_tokens=50)
    rooms = rooms_with(full)
    assert not rooms.has_room("w", 100) and rooms.has_room("w", 100, may_offer=True)
    rooms.sent("w", 100).refused()
    running = rooms.sent("w", 1)
    running.ended()
    assert not rooms.has_room("w", 100, may_offer=True)
    rooms.reported("w", full)
    assert rooms.has_room("w", 100, may_offer=True)


def test_seats_bound_what_is_sent_and_an_idle_worker_has_room_for_anything() -> None:
    rooms = rooms_with()
    for _ in range(5):  # 4 run, 8 may, one may queue
        assert rooms.has_room("w", 1)
        rooms.sent("w", 1)
    assert not rooms.has_room("w", 1, may_offer=True)
    idle = replace(REPORT, num_live=0)
    rooms.reported("idle", idle)
    assert rooms.has_room("idle", 10**9, num_requests=128)


def test_nothing_known_is_no_reason_to_wait_and_what_is_gone_is_forgotten() -> None:
    rooms = WorkerRooms()
    assert rooms.has_room("unknown", 10**9)
    rooms.sent("unknown", 5).ended()
    rooms.reported("w", Report(0, 0, 0, num_live=3))
    assert rooms.has_room("w", 10**9), "no pool is reported"
    call = rooms.sent("w", 5)
    rooms.forget("w")
    call.refused()
    assert len(rooms) == 0


def test_a_few_requests_go_by_the_estimate_once_a_grant_has_expired_or_one_of_any_number_of_answers() -> None:
    attachment = Attachment()
    attachment.granted(Grant(1, 1000, 9, valid_seconds=2.0), 0.0)
    assert attachment.has_room(100, 9, 1.0) is True
    assert attachment.has_room(100, 16, 3.0) is None
    attachment.sent(100, 3.0)
    assert attachment.has_room(100, 4, 3.0) is False
    assert attachment.has_room(100, 3, 3.0) is None

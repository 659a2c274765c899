"""A worker's final error is believed at once only where nothing speaks for a worker that errs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from control_plane.dispatch.doubts import Doubts, is_doubted, is_final
from control_plane.dispatch.submitter import DecodeSink
from control_plane.dispatch.worker_call import WorkerCall
from tandem_runtime.errors import DeadlineExceeded

PASSED = "the request's deadline passed while it ran"
CALL = SimpleNamespace(incarnation="w-1", watch=None, answer=lambda error: False, close=lambda cancel: None)


@pytest.mark.parametrize("is_past_deadline", [False, True])
def test_a_worker_is_believed_that_the_deadline_has_passed_once_it_has_by_the_gateways_clock(
    is_past_deadline: bool,
) -> None:
    """Another worker that is asked then may not answer: the client would wait for a second or more beyond it."""
    error = DeadlineExceeded(PASSED)
    Doubts().heard(cast(WorkerCall, CALL), error, is_refusal=False, is_past_deadline=is_past_deadline)
    assert (is_final(error), is_doubted(error)) == (is_past_deadline, not is_past_deadline)


@pytest.mark.parametrize("seconds_left", [1.0, -0.1])
def test_the_seconds_that_a_request_has_left_decide(seconds_left: float) -> None:
    failed: list[bool] = []
    state: Any = SimpleNamespace(
        seconds_left=seconds_left, doubts=Doubts(), call_failed=lambda call, error: failed.append(is_final(error))
    )
    nothing: Any = None
    DecodeSink(state, nothing, cast(WorkerCall, CALL), nothing).ended(DeadlineExceeded(PASSED))
    assert failed == [seconds_left < 0]

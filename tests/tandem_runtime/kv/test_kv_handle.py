"""Each edge of the handle's state machine, with literal times: leases last 10 s, the deadline is at 100."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvNotFound,
    Overloaded,
    StaleIncarnation,
    TandemError,
    Unavailable,
)
from tandem_runtime.kv_handle import HandleMachine, HandleState

S = HandleState


def awaited(num_readers: int = 1, *, reader_bound: bool = False) -> HandleMachine:
    return HandleMachine("handle h", num_readers, 100.0, reader_bound=reader_bound)


def reserved(num_readers: int = 1) -> HandleMachine:
    machine = awaited(num_readers)
    machine.reserve(0.0, "w", 10.0)
    return machine


def filling(num_readers: int = 1) -> HandleMachine:
    machine = reserved(num_readers)
    machine.seal(0.0, [slab(0)])
    return machine


def sealed(num_readers: int = 1) -> HandleMachine:
    machine = filling(num_readers)
    machine.seal(0.0, [], kv.Closed(num_blocks=2))
    return machine


def leased(num_readers: int = 1) -> HandleMachine:
    machine = sealed(num_readers)
    machine.lease(0.0, "r", 10.0)
    return machine


def slab(index: int, first_block: int = 0) -> kv.Slab:
    return kv.Slab(index=index, first_block=first_block, num_blocks=2)


def state_of(machine: HandleMachine) -> HandleState:
    """The state now: mypy takes a property for a constant."""
    return machine.state


LIVE = [awaited, reserved, filling, sealed, leased]


def test_a_handle_goes_from_reserved_to_released() -> None:
    machine = awaited()
    assert state_of(machine) is S.AWAITED
    assert machine.reserve(0.0, "w", 10.0)
    assert state_of(machine) is S.RESERVED
    assert machine.seal(1.0, [slab(0)])
    assert state_of(machine) is S.FILLING
    assert machine.seal(2.0, [slab(1, 2)], kv.Closed(num_blocks=4))
    assert state_of(machine) is S.SEALED
    machine.lease(3.0, "r", 10.0)
    assert (machine.state, machine.num_leases) == (S.LEASED, 1)
    assert machine.release("r")
    assert (machine.state, machine.num_leases, machine.slabs) == (S.RELEASED, 0, [])


def test_reserving_twice_is_reserving_once() -> None:
    machine = reserved()
    assert not machine.reserve(5.0, "w", 10.0)
    assert machine.lease_until == 10.0
    with pytest.raises(StaleIncarnation, match="reserved by w, not by another"):
        machine.reserve(5.0, "another", 10.0)


def test_nothing_is_sealed_before_it_is_reserved() -> None:
    with pytest.raises(KvNotFound, match="reserve it before sealing"):
        awaited().seal(0.0, [slab(0)])


def test_a_slab_is_sealed_once_and_for_good() -> None:
    machine = filling()
    assert not machine.seal(1.0, [slab(0)])
    with pytest.raises(InvalidRequest, match="slab 0 is sealed and cannot change"):
        machine.seal(1.0, [slab(0, first_block=9)])
    with pytest.raises(InvalidRequest, match="slab 2 leaves a gap after slab 0"):
        machine.seal(1.0, [slab(2)])
    with pytest.raises(InvalidRequest):
        machine.seal(1.0, [slab(1), slab(3)])
    assert machine.slabs == [slab(0)]


def test_a_closed_handle_takes_no_slab_but_hears_its_close_again() -> None:
    machine = sealed()
    assert not machine.seal(1.0, [slab(0)], kv.Closed(num_blocks=2))
    with pytest.raises(InvalidRequest, match="no slab can follow"):
        machine.seal(1.0, [slab(1)])
    with pytest.raises(InvalidRequest, match="closed with 2 blocks and cannot change"):
        machine.seal(1.0, [], kv.Closed(num_blocks=3))


def test_readers_may_come_before_the_writer() -> None:
    machine = awaited()
    machine.lease(0.0, "r", 10.0)
    machine.reserve(1.0, "w", 10.0)
    machine.seal(2.0, [slab(0)], kv.Closed(num_blocks=2))
    assert state_of(machine) is S.LEASED


def test_an_awaited_handle_whose_readers_left_does_not_wait_for_its_deadline() -> None:
    """They were killed before they could release, its writer before it could reserve."""
    machine = awaited(num_readers=2)
    assert not machine.expire(50.0)  # nobody has come yet
    machine.lease(50.0, "r", 10.0)
    machine.lease(55.0, "s", 10.0)
    machine.release("s")
    assert not machine.expire(64.0)
    assert machine.expire(65.0)
    assert (machine.state, machine.end_error and machine.end_error.message) == (
        S.EXPIRED,
        "handle h: its readers left before it was reserved",
    )


def test_the_last_reader_expected_ends_the_handle() -> None:
    machine = sealed(num_readers=2)
    machine.lease(0.0, "a", 10.0)
    assert machine.release("a")
    assert state_of(machine) is S.SEALED
    assert not machine.release("a")
    assert machine.release("b, which never came")
    assert state_of(machine) is S.RELEASED


def test_a_reader_that_has_released_gets_no_lease_again() -> None:
    machine = sealed(num_readers=2)
    machine.release("a")
    with pytest.raises(KvNotFound, match="reader a has released it"):
        machine.lease(0.0, "a", 10.0)


def test_readers_are_bounded_and_a_lapsed_one_makes_room() -> None:
    machine = sealed(num_readers=1)
    machine.lease(0.0, "dead", 5.0)
    machine.lease(0.0, "its replacement", 10.0)
    with pytest.raises(Overloaded, match="expects 1 readers and has 2"):
        machine.lease(0.0, "a third", 10.0)
    assert not machine.expire(6.0)
    machine.lease(6.0, "a third", 10.0)


def test_the_writers_lease_counts_until_the_close() -> None:
    machine = reserved()
    machine.lease(8.0, "r", 10.0)
    machine.renew_writer(4.0)
    assert machine.lease_until == 14.0
    assert not machine.expire(13.9)
    assert machine.expire(14.0)
    assert state_of(machine) is S.EXPIRED
    assert "neither sealed nor renewed for 10 s" in str(machine.end_error)


def test_a_seal_renews_the_writers_lease() -> None:
    machine = reserved()
    machine.seal(9.0, [slab(0)])
    assert machine.lease_until == 19.0
    machine.seal(12.0, [slab(0)])
    assert machine.lease_until == 22.0


def test_a_writer_that_passes_a_prompt_in_windows_does_not_wait_for_readers_that_are_gone() -> None:
    machine = awaited()
    machine.reserve(0.0, "w", 10.0, is_windowed=True)
    machine.lease(12.0, "r", 10.0)
    machine.seal(20.0, [slab(0)])
    machine.renew_writer(21.0)
    assert (machine.lease_until, machine.expire(21.9)) == (22.0, False)
    assert machine.expire(22.0)
    assert "its writer waits for readers and has none" in str(machine.end_error)


@pytest.mark.parametrize("fills", [False, True])
def test_readers_of_a_prompt_that_passes_in_windows_come_within_two_leases(*, fills: bool) -> None:
    machine = awaited()
    machine.reserve(0.0, "w", 10.0, is_windowed=True)
    if fills:
        machine.seal(5.0, [slab(0)])
    machine.renew_writer(14.0)
    assert not machine.expire(19.9)
    assert machine.expire(20.0)


def test_after_the_close_the_last_readers_lease_counts() -> None:
    machine = sealed(num_readers=2)
    machine.lease(5.0, "a", 10.0)
    machine.lease(7.0, "b", 10.0)
    machine.renew_writer(50.0)
    assert machine.lease_until == 17.0
    machine.expire(16.0)
    assert (machine.state, machine.num_leases) == (S.LEASED, 1)
    assert machine.expire(17.0)
    assert state_of(machine) is S.EXPIRED


def test_a_lease_is_never_shortened() -> None:
    machine = sealed()
    machine.lease(5.0, "r", 10.0)
    machine.lease(5.0, "r", 1.0)
    assert machine.lease_until == 15.0


@pytest.mark.parametrize("make", LIVE)
def test_the_deadline_ends_everything(make: Callable[[], HandleMachine]) -> None:
    machine = make()
    machine.lease(99.0, "r", 10.0)
    assert machine.lease_until <= 100.0
    assert machine.expire(100.0)
    assert (machine.state, type(machine.end_error)) == (S.EXPIRED, DeadlineExceeded)


@pytest.mark.parametrize("make", LIVE)
def test_every_live_handle_can_be_aborted_and_says_why(make: Callable[[], HandleMachine]) -> None:
    machine = make()
    assert machine.abort(Unavailable("the worker is gone"))
    assert state_of(machine) is S.ABORTED
    for call in late_calls(machine):
        with pytest.raises(Unavailable, match="the worker is gone"):
            call()


@pytest.mark.parametrize("make", LIVE)
def test_every_live_handle_can_be_released_for_all(make: Callable[[], HandleMachine]) -> None:
    machine = make()
    assert machine.release_all()
    assert state_of(machine) is S.RELEASED
    for call in late_calls(machine):
        with pytest.raises(KvNotFound):
            call()


@pytest.mark.parametrize(
    "end", [lambda m: m.release_all(), lambda m: m.abort(Unavailable("x")), lambda m: m.expire(200.0)]
)
def test_what_has_ended_stays_as_it_ended(end: Callable[[HandleMachine], bool]) -> None:
    machine = leased()
    assert end(machine)
    state, error = machine.state, machine.end_error
    assert not machine.release("r")
    assert not machine.release_all()
    assert not machine.abort(InvalidRequest("another reason"))
    assert not machine.expire(300.0)
    machine.renew_writer(300.0)
    assert (machine.state, machine.end_error) == (state, error)


def test_a_reader_bound_handle_ends_with_the_last_reader_that_came() -> None:
    machine = awaited(num_readers=3, reader_bound=True)
    machine.reserve(0.0, "w", 10.0)
    machine.lease(0.0, "a", 10.0)
    machine.lease(0.0, "b", 10.0)
    machine.release("a")
    assert state_of(machine) is S.RESERVED
    machine.release("b")
    assert state_of(machine) is S.RELEASED


def test_a_reader_bound_handle_expires_when_its_readers_leases_have() -> None:
    machine = awaited(num_readers=3, reader_bound=True)
    machine.reserve(0.0, "w", 50.0)
    assert not machine.expire(1.0)  # no reader has come yet
    machine.lease(1.0, "a", 10.0)
    assert not machine.expire(10.9)
    assert machine.expire(11.0)


def late_calls(machine: HandleMachine) -> list[Callable[[], object]]:
    return [
        lambda: machine.reserve(1.0, "w", 10.0),
        lambda: machine.seal(1.0, [slab(0)]),
        lambda: machine.seal(1.0, [], kv.Closed(num_blocks=2)),
        lambda: machine.lease(1.0, "r", 10.0),
    ]


def test_the_error_that_ended_a_handle_is_raised_anew_each_time() -> None:
    machine = reserved()
    reason: TandemError = Unavailable("gone", field="region_id")
    machine.abort(reason)
    with pytest.raises(Unavailable) as raised:
        machine.lease(0.0, "r", 10.0)
    assert raised.value is not reason  # else every caller's traceback grows on one object
    assert raised.value.field == "region_id"

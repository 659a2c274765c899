"""A handle keeps its invariants under any calls in any order."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import TandemError, Unavailable
from tandem_runtime.kv_handle import HandleMachine, HandleState

S = HandleState
NEXT = {
    S.AWAITED: {S.RESERVED, S.RELEASED, S.ABORTED, S.EXPIRED},
    S.RESERVED: {S.FILLING, S.SEALED, S.LEASED, S.RELEASED, S.ABORTED, S.EXPIRED},
    S.FILLING: {S.SEALED, S.LEASED, S.RELEASED, S.ABORTED, S.EXPIRED},
    S.SEALED: {S.LEASED, S.RELEASED, S.ABORTED, S.EXPIRED},
    S.LEASED: {S.SEALED, S.RELEASED, S.ABORTED, S.EXPIRED},
    S.RELEASED: set(),
    S.ABORTED: set(),
    S.EXPIRED: set(),
}
READERS = st.sampled_from(["a", "b", "c"])


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.handle = HandleMachine("h", 2, 60.0)
        self.seen = S.AWAITED
        self.sealed: list[kv.Slab] = []
        self.done: set[str] = set()

    def attempt(self, call: object) -> None:
        """Make a call; one that raises must have changed nothing."""
        before = self.picture()
        try:
            call()  # type: ignore[operator]
        except TandemError:
            assert self.picture() == before

    def picture(self) -> tuple[object, ...]:
        handle = self.handle
        return handle.state, handle.num_leases, len(handle.slabs), handle.closed, handle.lease_until, handle.end_error

    @rule(writer=st.sampled_from(["w", "x"]), is_windowed=st.booleans())
    def reserve(self, writer: str, is_windowed: bool) -> None:
        self.attempt(lambda: self.handle.reserve(self.now, writer, 10.0, is_windowed=is_windowed))

    @rule(index=st.integers(0, 3), is_closing=st.booleans())
    def seal(self, index: int, is_closing: bool) -> None:
        closed = kv.Closed(num_blocks=8) if is_closing else None
        self.attempt(lambda: self.handle.seal(self.now, [kv.Slab(index=index)], closed))

    @rule(reader=READERS)
    def lease(self, reader: str) -> None:
        self.attempt(lambda: self.handle.lease(self.now, reader, 10.0))

    @rule()
    def renew(self) -> None:
        self.handle.renew_writer(self.now)

    @rule(reader=READERS)
    def release(self, reader: str) -> None:
        if not self.handle.ended:
            self.done.add(reader)
        self.handle.release(reader)
        before = self.picture()
        assert not self.handle.release(reader)
        assert self.picture() == before

    @rule(is_abort=st.booleans(), chance=st.integers(0, 9))
    def end(self, is_abort: bool, chance: int) -> None:
        if chance == 0:
            _ = self.handle.abort(Unavailable("x")) if is_abort else self.handle.release_all()

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.handle.expire(self.now)
        if not self.handle.ended:
            assert self.now < self.handle.lease_until

    @invariant()
    def states_follow_the_drawing(self) -> None:
        state = self.handle.state
        assert state is self.seen or state in NEXT[self.seen], f"{self.seen.name} -> {state.name}"
        self.seen = state

    @invariant()
    def slabs_only_grow_and_go_with_the_end(self) -> None:
        if self.handle.ended:
            assert self.handle.slabs == []
            assert self.handle.num_leases == 0
            assert self.handle.end_error is not None
        else:
            assert self.handle.slabs[: len(self.sealed)] == self.sealed
            assert [slab.index for slab in self.handle.slabs] == list(range(len(self.handle.slabs)))
            self.sealed = list(self.handle.slabs)

    @invariant()
    def enough_releases_end_it(self) -> None:
        assert self.handle.ended or len(self.done) < 2

    @invariant()
    def no_lease_outlives_the_deadline(self) -> None:
        assert self.handle.lease_until <= 60.0

    def teardown(self) -> None:
        with contextlib.suppress(TandemError):
            self.handle.lease(self.now, "a", 1000.0)
        self.handle.expire(60.0)
        assert self.handle.ended, "nothing lives past its deadline"


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_any_order_of_calls_keeps_the_laws = AnyOrder.TestCase

"""A gateway is ready once it has seen its fleet; a model while requests pass every phase, or its workers are full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from structlog.testing import capture_logs

from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.fleet.model_catalog import ModelCatalog
from control_plane.fleet.registry import WorkerRegistry
from control_plane.generation import NOTHING, Dispatcher, TokenRequest
from control_plane.readiness import GRACE_SECONDS, Prober
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Draining, ModelNotFound, Overloaded, Unavailable
from tests.tandem_worker.kv_harness import until


class Probed:
    """Catalog and dispatcher in one: answers a probe with tokens or an error."""

    def __init__(self) -> None:
        self.requests: list[TokenRequest] = []
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        self.stuck: set[str] = set()
        self.problems: dict[str, str] = {}
        self.awaited: frozenset[str] = frozenset()
        self.came = asyncio.Event()
        self.proven: Callable[[str, bool], None] = lambda model_id, handed_over: None

    async def prefetch(self) -> None: ...

    def problem_of(self, model_id: str) -> str:
        return self.problems.get(model_id, "")

    def without_files(self) -> frozenset[str]:
        return self.awaited

    def card(self, name: str) -> pb.ModelCard:
        if name == "nobody's":
            raise ModelNotFound('no model "nobody\'s" here')
        return pb.ModelCard(model_id=name.removeprefix("alias-of-"), context_length=10, vocab_size=5)

    async def submit(self, request: TokenRequest) -> Any:
        self.requests.append(request)
        self.came.set()
        if request.model_id in self.stuck:
            await asyncio.Event().wait()
        if (error := self.errors.get(request.model_id, self.error)) is not None:
            raise error
        return self._tokens(request.model_id)

    async def _tokens(self, model_id: str) -> Any:
        yield "a delta"
        self.proven(model_id, False)


class Harness:
    def __init__(self) -> None:
        self.now = 100.0
        self.registry = WorkerRegistry(3.0, 5.0)
        self.probed = Probed()
        self.proofs = ReadinessProofs(self.registry, clock=lambda: self.now)
        self.prober = Prober(
            self.registry,
            cast(ModelCatalog, self.probed),
            cast(Dispatcher, self.probed),
            self.proofs,
            interval_seconds=10.0,
            valid_seconds=30.0,
            clock=lambda: self.now,
        )
        self.probed.proven = self.proofs.record

    def serve(
        self,
        model_id: str,
        role: pb.WorkerRole.ValueType = pb.WORKER_ROLE_DECODE,
        state: pb.WorkerState.ValueType = pb.WORKER_STATE_READY,
    ) -> None:
        card = pb.ModelCard(model_id=model_id)
        info = pb.WorkerInfo(worker_id=model_id, incarnation="1", role=role, card=card)
        self.registry.register(info, pb.LoadReport(state=state))

    async def is_ready(self, model: str = "") -> bool:
        return (await self.prober.check(model))[0]

    async def states(self) -> dict[str, str]:
        states: dict[str, str] = (await self.prober.check())[1]["states"]
        return states

    def prefill(self, state: pb.WorkerState.ValueType) -> None:
        """Register a KV service, and a prefill worker in this state."""
        kv = pb.WorkerInfo(worker_id="kv", incarnation="1", role=pb.WORKER_ROLE_KV, address="kv:1")
        self.registry.register(kv, pb.LoadReport(state=pb.WORKER_STATE_READY))
        card = pb.ModelCard(model_id="m" if state == pb.WORKER_STATE_READY else "")
        info = pb.WorkerInfo(worker_id="p", incarnation="1", role=pb.WORKER_ROLE_PREFILL, card=card, kv_address="kv:1")
        self.registry.register(info, pb.LoadReport(state=state, load_stage="reading weights"))

    async def probe_once(self) -> None:
        """Run the prober until it has sent a probe and has recorded the result."""
        self.probed.came.clear()
        running = asyncio.create_task(self.prober.run())
        async with asyncio.timeout(10):
            await self.probed.came.wait()
            for _ in range(5):
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def running(prober: Prober) -> AsyncIterator[None]:
    task = asyncio.create_task(prober.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_not_ready_before_a_model_is_loaded_and_a_request_has_gone_through() -> None:
    harness = Harness()
    nothing: dict[str, Any] = {"models": [], "proven_seconds_ago": {}, "states": {}, "reasons": {}}
    assert await harness.prober.check() == (
        False,
        {"ready": False, **nothing, "reason": "no worker has loaded a model yet"},
    )
    harness.serve("m")
    assert await harness.prober.check() == (
        False,
        {
            "ready": False,
            "models": ["m"],
            "proven_seconds_ago": {},
            "states": {"m": "unproven"},
            "reasons": {"m": "no request has gone the whole way yet"},
            "reason": "no request has gone the whole way yet",
        },
    )
    await harness.probe_once()
    assert await harness.is_ready()
    (request,) = harness.probed.requests
    assert request.cache == NOTHING and len(request.token_ids) + request.sampling.max_tokens <= 10
    assert max(request.token_ids) < 5
    assert request.is_probe and request.reject_if_busy, "a probe takes no place in a room"


async def test_after_the_grace_a_gateway_is_ready_though_nothing_was_proven_and_its_model_is_not() -> None:
    harness = Harness()
    harness.now += 1000
    assert not await harness.is_ready(), "no worker has come: the grace has not begun"
    harness.serve("m")
    assert not await harness.is_ready()
    harness.now += GRACE_SECONDS - 1
    assert not await harness.is_ready()
    harness.now += 1
    assert (await harness.is_ready(), await harness.is_ready("m")) == (True, False)


async def test_the_grace_begins_again_with_a_fleet_that_went_away_before_it_was_seen() -> None:
    harness = Harness()
    harness.serve("m")
    assert not await harness.is_ready()
    harness.registry.deregister("m", "1")
    assert not await harness.is_ready()
    harness.now += GRACE_SECONDS
    harness.serve("m")
    assert not await harness.is_ready()


async def test_a_gateway_that_has_seen_its_fleet_does_not_depend_on_single_models() -> None:
    """Finding 5: A full, B idle and well, and the gateway was not ready."""
    harness = Harness()
    for model_id in ("full", "idle", "lost", "silent", "broken"):
        harness.serve(model_id)
        harness.proofs.record(model_id, True)
    assert await harness.is_ready()
    harness.probed.errors["full"] = Overloaded("every decode worker is busy")
    harness.probed.errors["silent"] = Unavailable("the worker does not answer")
    harness.probed.problems["broken"] = "its tokenizer cannot be read"
    harness.registry.deregister("lost", "1")
    harness.now += 31
    await harness.probe_once()
    is_ready, details = await harness.prober.check()
    expected = {"broken": "unusable", "full": "full", "idle": "proven", "lost": "lost", "silent": "unproven"}
    assert (is_ready, details["states"]) == (True, expected)
    assert details["reasons"] == {
        "broken": "its tokenizer cannot be read",
        "full": "every decode worker is busy",
        "lost": "no decode worker is ready for lost",
        "silent": "the worker does not answer",
    }
    ready = {model_id: await harness.is_ready(model_id) for model_id in expected}
    assert ready == {"broken": False, "full": True, "idle": True, "lost": False, "silent": False}


async def test_a_gateway_whose_only_model_is_full_is_ready_from_the_start() -> None:
    harness = Harness()
    harness.serve("m")
    harness.probed.error = Overloaded("full")
    await harness.probe_once()
    assert (await harness.is_ready(), await harness.is_ready("m")) == (True, True)
    harness.now += 29
    assert await harness.states() == {"m": "full"}
    harness.now += 1
    assert await harness.states() == {"m": "unproven"}
    harness.probed.error = None
    await harness.probe_once()
    assert await harness.states() == {"m": "proven"}


async def test_a_worker_that_drains_is_not_full() -> None:
    harness = Harness()
    harness.serve("m")
    harness.probed.error = Draining("the worker drains")
    await harness.probe_once()
    assert (await harness.states(), await harness.is_ready()) == ({"m": "unproven"}, False)


async def test_without_any_worker_a_gateway_is_not_ready_whatever_it_has_seen() -> None:
    harness = Harness()
    harness.serve("m")
    harness.proofs.record("m", True)
    assert await harness.is_ready()
    harness.registry.deregister("m", "1")
    is_ready, details = await harness.prober.check()
    assert (is_ready, details["reason"]) == (False, "no decode worker is ready for m")
    harness.serve("m")
    assert (await harness.is_ready(), await harness.states()) == (True, {"m": "unproven"})


async def test_a_model_is_asked_for_by_any_of_its_names() -> None:
    harness = Harness()
    assert await harness.prober.check("m") == (
        False,
        {"ready": False, "model": "m", "state": "lost", "reason": "no worker has loaded m yet"},
    )
    harness.serve("m")
    harness.proofs.record("m", True)
    assert await harness.prober.check("alias-of-m") == (True, {"ready": True, "model": "m", "state": "proven"})
    assert await harness.prober.check("nobody's") == (
        False,
        {"ready": False, "model": "nobody's", "state": "lost", "reason": 'no model "nobody\'s" here'},
    )


async def test_models_are_probed_side_by_side_and_broken_ones_leave_places_for_others() -> None:
    harness = Harness()
    stuck = {f"stuck-{i}" for i in range(8)}
    harness.probed.stuck = stuck
    for model_id in stuck:
        harness.serve(model_id)
    async with running(harness.prober):
        await until(lambda: len(harness.probed.requests) == 8)
    for model_id in stuck:  # as after their 20 s
        harness.prober._states.probe_failed(model_id, "it did not come back")
    harness.probed.requests.clear()
    well = ("well-0", "well-1", "well-2")
    async with running(harness.prober):
        await until(lambda: len(harness.probed.requests) == 6)
        for model_id in well:
            harness.serve(model_id)
        await until(lambda: all(harness.proofs.age(model_id) is not None for model_id in well))
        assert len({request.model_id for request in harness.probed.requests} & stuck) == 6, "two places are left"


async def test_models_of_encoders_are_ready_with_their_workers() -> None:
    harness = Harness()
    harness.serve("e", pb.WORKER_ROLE_ENCODE)
    assert (await harness.is_ready(), await harness.is_ready("e"), await harness.states()) == (
        True,
        True,
        {"e": "proven"},
    )
    harness.serve("e", pb.WORKER_ROLE_ENCODE, pb.WORKER_STATE_DRAINING)
    assert (await harness.is_ready(), await harness.states()) == (False, {"e": "lost"})


async def test_a_model_is_not_ready_before_the_gateway_has_its_files() -> None:
    """Found by chaos: workers whose certificates looked expired sent no files, and clients of a ready model got 503."""
    harness = Harness()
    harness.serve("m")
    harness.serve("e", pb.WORKER_ROLE_ENCODE)
    harness.serve("lost")
    harness.proofs.record("m", True)
    harness.registry.deregister("lost", "1")
    harness.probed.awaited = frozenset({"m", "e", "lost"})
    is_ready, details = await harness.prober.check()
    assert (is_ready, details["states"]) == (False, {"e": "loading", "m": "loading"})
    assert details["reasons"]["m"] == "this gateway has not got the files of m from its workers yet"
    assert (await harness.is_ready("m"), await harness.is_ready("e")) == (False, False)
    harness.probed.awaited = frozenset()
    assert (await harness.is_ready(), await harness.states()) == (True, {"e": "proven", "m": "proven"})


async def test_a_model_that_was_lost_is_shown_for_an_hour() -> None:
    harness = Harness()
    harness.serve("m")
    assert await harness.states() == {"m": "unproven"}
    harness.registry.deregister("m", "1")
    harness.now += 3600
    assert await harness.states() == {"m": "lost"}
    harness.now += 1
    assert await harness.states() == {}


async def test_a_proof_ages_and_a_users_request_renews_it() -> None:
    harness = Harness()
    harness.serve("m")
    harness.proofs.record("m", True)
    harness.now += 29
    assert await harness.is_ready("m")
    harness.now += 1
    assert not await harness.is_ready("m")
    harness.proofs.record("m", True)
    assert await harness.prober.check() == (
        True,
        {"ready": True, "models": ["m"], "proven_seconds_ago": {"m": 0.0}, "states": {"m": "proven"}, "reasons": {}},
    )


async def test_a_probe_that_fails_says_why_and_a_bug_in_one_does_not_end_the_others() -> None:
    harness = Harness()
    harness.serve("m")
    for error in (Unavailable("prefill is away"), RuntimeError("a bug")):
        harness.probed.error = error
        await harness.probe_once()
        is_ready, details = await harness.prober.check()
        assert not is_ready and str(error) in details["reason"]
    harness.probed.error = None
    await harness.probe_once()
    assert await harness.is_ready()


async def test_where_there_is_prefill_only_a_hand_over_proves_the_way() -> None:
    harness = Harness()
    harness.prefill(pb.WORKER_STATE_LOADING)
    assert (await harness.prober.check())[1]["reason"] == "p is loading: reading weights"
    harness.serve("m")
    harness.proofs.record("m", False)
    is_ready, details = await harness.prober.check()
    assert (is_ready, details["states"], details["reason"]) == (
        False,
        {"m": "loading"},
        "p is loading: reading weights",
    )
    harness.prefill(pb.WORKER_STATE_READY)
    assert not await harness.is_ready()
    harness.proofs.record("m", True)
    assert await harness.is_ready()


async def test_a_probe_that_decode_computes_since_prefill_is_full_shows_a_full_model() -> None:
    harness = Harness()
    harness.prefill(pb.WORKER_STATE_READY)
    harness.serve("m")
    harness.probed.proven = lambda model_id, handed_over: harness.proofs.record(model_id, False, Overloaded("256 wait"))
    await harness.probe_once()
    assert (await harness.states(), await harness.is_ready("m")) == ({"m": "full"}, True)
    harness.proofs.record("m", True)
    assert await harness.states() == {"m": "proven"}


async def test_a_prefill_worker_that_starts_again_takes_no_model_away() -> None:
    """It names its model only once that is loaded, and decode computes prompts itself meanwhile."""
    harness = Harness()
    harness.serve("m")
    harness.prefill(pb.WORKER_STATE_READY)
    harness.proofs.record("m", True)
    assert await harness.is_ready("m")
    harness.prefill(pb.WORKER_STATE_LOADING)
    assert await harness.is_ready("m")


def test_the_log_says_when_a_model_is_ready_and_again_when_a_prefill_worker_has_joined() -> None:
    harness = Harness()
    harness.serve("m")
    with capture_logs() as lines:
        harness.proofs.record("m", False)
        harness.proofs.record("m", False)
        harness.prefill(pb.WORKER_STATE_READY)
        harness.proofs.record("m", False)
        harness.proofs.record("m", True)
        harness.proofs.record("m", True)
    told = [(line["model"], line["handed_over"]) for line in lines if line["event"] == "model_ready"]
    assert told == [("m", False), ("m", True)]


async def test_an_answer_that_was_not_handed_over_takes_no_proof_away() -> None:
    """Decode computes short prompts itself; probes keep proving the path through prefill."""
    harness = Harness()
    harness.prefill(pb.WORKER_STATE_READY)
    harness.serve("m")
    harness.proofs.record("m", True)
    harness.now += 20
    harness.proofs.record("m", False)
    assert (await harness.prober.check())[1]["proven_seconds_ago"] == {"m": 20.0}
    harness.now += 10
    assert not await harness.is_ready("m")
    await harness.probe_once()
    assert all(request.is_probe for request in harness.probed.requests)


async def test_a_model_whose_last_decode_worker_has_gone_needs_a_new_proof() -> None:
    harness = Harness()
    for model_id in ("m", "n"):
        harness.serve(model_id)
        harness.proofs.record(model_id, True)
    harness.registry.deregister("m", "1")
    harness.serve("m")
    assert (harness.proofs.age("m"), harness.proofs.age("n")) == (None, 0.0)

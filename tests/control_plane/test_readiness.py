"""/readyz answers 200 only after a recent request has passed every phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from structlog.testing import capture_logs

from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.fleet.model_catalog import ModelCatalog
from control_plane.fleet.registry import WorkerRegistry
from control_plane.generation import NOTHING, Dispatcher, TokenRequest
from control_plane.readiness import Prober
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Unavailable


class Probed:
    """Catalog and dispatcher in one: answers a probe with tokens or an error."""

    def __init__(self) -> None:
        self.requests: list[TokenRequest] = []
        self.error: Exception | None = None
        self.came = asyncio.Event()
        self.proven: Callable[[str, bool], None] = lambda model_id, handed_over: None

    async def prefetch(self) -> None: ...

    def card(self, name: str) -> pb.ModelCard:
        return pb.ModelCard(model_id=name, context_length=10, vocab_size=5)

    async def submit(self, request: TokenRequest) -> Any:
        self.requests.append(request)
        self.came.set()
        if self.error is not None:
            raise self.error
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
        )
        self.probed.proven = self.proofs.record

    def serve(self, model_id: str) -> None:
        card = pb.ModelCard(model_id=model_id)
        info = pb.WorkerInfo(worker_id=model_id, incarnation="1", role=pb.WORKER_ROLE_DECODE, card=card)
        self.registry.register(info, pb.LoadReport(state=pb.WORKER_STATE_READY))

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
            for _ in range(3):
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_not_ready_before_a_model_is_loaded_and_a_request_has_gone_through() -> None:
    harness = Harness()
    assert await harness.prober.check() == (
        False,
        {"ready": False, "models": [], "proven_seconds_ago": {}, "reason": "no worker has loaded a model yet"},
    )
    harness.serve("m")
    assert not (await harness.prober.check())[0]
    await harness.probe_once()
    assert (await harness.prober.check())[0]
    (request,) = harness.probed.requests
    assert request.cache == NOTHING and len(request.token_ids) + request.sampling.max_tokens <= 10
    assert max(request.token_ids) < 5


async def test_a_proof_ages_and_a_users_request_renews_it() -> None:
    harness = Harness()
    harness.serve("m")
    harness.proofs.record("m", True)
    harness.now += 29
    assert (await harness.prober.check())[0]
    harness.now += 1
    assert not (await harness.prober.check())[0]
    harness.proofs.record("m", True)
    assert await harness.prober.check() == (True, {"ready": True, "models": ["m"], "proven_seconds_ago": {"m": 0.0}})


async def test_every_served_model_needs_its_proof() -> None:
    harness = Harness()
    for model_id in ("m", "n"):
        harness.serve(model_id)
    harness.proofs.record("m", True)
    assert not (await harness.prober.check())[0]


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
    assert (await harness.prober.check())[0]


async def test_where_there_is_prefill_only_a_hand_over_proves_the_way() -> None:
    harness = Harness()
    harness.serve("m")
    harness.proofs.record("m", False)
    assert (await harness.prober.check())[0]
    harness.prefill(pb.WORKER_STATE_LOADING)
    is_ready, details = await harness.prober.check()
    assert (is_ready, details["reason"]) == (False, "p is loading: reading weights")
    harness.prefill(pb.WORKER_STATE_READY)
    assert not (await harness.prober.check())[0]
    harness.proofs.record("m", True)
    assert (await harness.prober.check())[0]


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


async def test_a_proof_ends_with_the_last_decode_worker_that_could_have_given_it() -> None:
    harness = Harness()
    harness.prefill(pb.WORKER_STATE_READY)
    harness.serve("m")
    harness.proofs.record("m", True)
    assert (await harness.prober.check())[0]
    harness.registry.deregister("m", "1")
    assert (await harness.prober.check())[1]["reason"] == "no decode worker is ready for m"
    harness.serve("m")
    assert not (await harness.prober.check())[0]


async def test_an_answer_that_was_not_handed_over_takes_no_proof_away() -> None:
    """Decode computes short prompts itself; probes keep proving the path through prefill."""
    harness = Harness()
    harness.prefill(pb.WORKER_STATE_READY)
    harness.serve("m")
    harness.proofs.record("m", True)
    harness.now += 20
    harness.proofs.record("m", False)
    assert await harness.prober.check() == (True, {"ready": True, "models": ["m"], "proven_seconds_ago": {"m": 20.0}})
    harness.now += 10
    assert not (await harness.prober.check())[0]
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

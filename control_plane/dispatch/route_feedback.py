"""What does the router learn from a request: where blocks are now, and how long things took?"""

from __future__ import annotations

from control_plane.dispatch.request_state import Plan
from control_plane.dispatch.request_stream import Flight
from control_plane.dispatch.worker_call import Leg
from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.router import Router
from tandem.v1 import types_pb2 as pb


class Lessons:
    """Reads legs and ledgers, and tells the router's index and speeds."""

    def __init__(self, registry: WorkerRegistry, router: Router) -> None:
        self._registry = registry
        self._prefixes = router.prefixes
        self._speeds = router.speeds

    def prompt_read(self, plan: Plan, leg: Leg) -> None:
        """A leg's worker has the prompt's cache: it computed it and offered it to its host's store, or pulled it."""
        was_pulled = leg.link.worker.role == pb.WORKER_ROLE_DECODE and leg.submit.HasField("handle")
        host_id = "" if was_pulled else self._store_of(leg)
        left = leg.submit.block_hashes[: plan.hashes.max_left_blocks] if plan.hashes else ()
        self._prefixes.learn(left, leg.link.worker.incarnation, host_id)

    def ledger_came(self, plan: Plan, leg: Leg, ledger: pb.PhaseLedger) -> None:
        """A phase is over: compare what was expected of the caches with what was there, and note its speed."""
        worker, reading = leg.link.worker, leg.reading
        self._speeds.prompt_read(worker.incarnation, ledger)
        if reading is None or plan.hashes is None:
            return
        cached, size = reading.cached, plan.card.block_size
        num_found = ledger.num_cached_tokens - cached.own
        self._speeds.promised(worker.info.host_id, cached.host, num_found)
        num_missing = cached.host + cached.remote - max(0, num_found)
        if cached.remote and num_missing > 0:
            end = (cached.own + cached.host + cached.remote) // size
            first = end - min(num_missing, cached.remote) // size
            self._prefixes.forget(leg.submit.block_hashes[first:end], cached.remote_host)

    def finished(self, flight: Flight) -> None:
        """Every token was delivered: how long did the hand-over take?"""
        ledger = flight.choices[0].ledger
        if flight.prefill_ledger is not None and ledger is not None:
            self._speeds.handed_over(flight.prefill_ledger, ledger)

    def ended(self, plan: Plan) -> None:
        """The request is over: the blocks that its answers filled are where they were written.

        An answer's last token has no KV; an answer of one token may be prefill's alone.
        """
        for choice in plan.flight.choices:
            leg = choice.leg
            if plan.hashes is None or leg is None or not leg.has_output or len(choice.tokens) < 2:
                continue
            incarnation, num_prompt_blocks = leg.link.worker.incarnation, len(plan.hashes.blocks)
            block_hashes = plan.hashes_of(choice.tokens[:-1])[: plan.hashes.max_left_blocks]
            self._prefixes.learn(block_hashes[num_prompt_blocks:], incarnation, self._store_of(leg))
            self._prefixes.learn(block_hashes[:num_prompt_blocks], incarnation, "")

    def _store_of(self, leg: Leg) -> str:
        """Return the host whose store a worker offers its blocks to, "" if there is none."""
        host_id = leg.link.worker.info.host_id
        return host_id if self._registry.store_of(host_id) else ""

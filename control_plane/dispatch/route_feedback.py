"""Reports to the router where blocks are now and how long phases took."""

from __future__ import annotations

from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.registry import WorkerRegistry
from control_plane.routing.router import Router
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import types_pb2 as pb


class RouteFeedback:
    """Reads calls and ledgers; writes the router's prefix index, cost model and session affinity."""

    def __init__(self, registry: WorkerRegistry, router: Router) -> None:
        self._registry = registry
        self._prefixes = router.prefixes
        self._costs = router.costs
        self._affinity = router.affinity

    def started(self, state: RequestState) -> None:
        """Both halves were accepted: the session goes to the same workers next time."""
        calls = state.prefill, state.choices[0].call
        route = SessionRoute(*(call.incarnation if call else "" for call in calls))
        self._affinity.remember(state.request.session_affinity, route)

    def prompt_read(self, state: RequestState, call: WorkerCall) -> None:
        """The call's worker has the prompt's cache. It computed the cache and offered it to the store, or pulled it."""
        was_pulled = call.link.worker.role == pb.WORKER_ROLE_DECODE and call.submit.HasField("handle")
        host_id = "" if was_pulled else self._store_of(call)
        left = call.submit.block_hashes[: state.hashes.max_left_blocks] if state.hashes else ()
        self._prefixes.learn(left, call.incarnation, host_id)

    def ledger_received(self, state: RequestState, call: WorkerCall, ledger: pb.PhaseLedger) -> None:
        """A phase has ended: record its speed, and compare the expected cached tokens with those that were found."""
        self._costs.prompt_read(call.incarnation, ledger)
        if call.estimate is None or state.hashes is None:
            return
        cached, size = call.estimate.cached, state.card.block_size
        num_found = ledger.num_cached_tokens - cached.own
        self._costs.store_used(call.link.worker.info.host_id, cached.host, num_found)
        num_missing = cached.host + cached.remote - max(0, num_found)
        if cached.remote and num_missing > 0:
            end = (cached.own + cached.host + cached.remote) // size
            first = end - min(num_missing, cached.remote) // size
            self._prefixes.forget(call.submit.block_hashes[first:end], cached.remote_host)

    def finished(self, state: RequestState) -> None:
        """Every token was delivered: record how long the hand-over took."""
        ledger = state.choices[0].ledger
        if state.prefill_ledger is not None and ledger is not None:
            self._costs.handed_over(state.prefill_ledger, ledger)

    def closed(self, state: RequestState) -> None:
        """The request has ended: its answers' blocks are at the workers that generated them.

        An answer's last token has no KV. An answer of one token may come from prefill alone.
        """
        for choice in state.choices:
            call = choice.call
            if state.hashes is None or call is None or not call.has_output or len(choice.tokens) < 2:
                continue
            num_prompt_blocks = len(state.hashes.blocks)
            block_hashes = state.hashes_with(choice.tokens[:-1])[: state.hashes.max_left_blocks]
            self._prefixes.learn(block_hashes[num_prompt_blocks:], call.incarnation, self._store_of(call))
            self._prefixes.learn(block_hashes[:num_prompt_blocks], call.incarnation, "")

    def _store_of(self, call: WorkerCall) -> str:
        """Return the host whose block store the worker offers its blocks to, "" if there is none."""
        host_id = call.link.worker.info.host_id
        return host_id if self._registry.store_of(host_id) else ""

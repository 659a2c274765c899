"""Records what requests show: where blocks are, how long phases take, and which models work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from control_plane.dispatch.block_hashes import PromptHashes
from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.groups import index_space
from control_plane.routing.router import Router
from control_plane.routing.session_affinity import SessionRoute
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)


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
        """The call's worker has the prompt's cache. It computed the cache and offered it to the store, or pulled it.

        The prompt is learnt once for each place, and not for each of its choices.
        """
        hashes = state.hashes
        if hashes is None:
            return
        worker = call.link.worker
        was_pulled = worker.role == pb.WORKER_ROLE_DECODE and call.submit.HasField("handle")
        host_id = "" if was_pulled else self._store_of(call)
        self._learn_answer(hashes, _answer_before(state, call), worker, host_id)
        if state.prompt_came_to(call.incarnation, host_id):
            self._learn_prompt(hashes, worker, host_id)

    def hand_over_began(self, state: RequestState, call: WorkerCall) -> None:
        """Prefill has brought the first token: from now on the decode workers can be late."""
        if call.estimate is None:
            return
        num_tokens = len(state.request.token_ids)
        readers = {choice.call.incarnation: choice.call.link.worker for choice in state.choices if choice.call}
        costs = [self._costs.hand_over(call.estimate, num_tokens, reader).ms for reader in readers.values()]
        state.prompt_came(max(costs, default=0.0) / 1000)

    def ledger_received(self, state: RequestState, call: WorkerCall, ledger: pb.PhaseLedger) -> None:
        """A phase has ended: record its speed, and compare the expected cached tokens with those that were found."""
        if self._registry.is_here(call.link.worker):
            repeats_token = call.submit.HasField("handle")  # prefill's, at once, whatever is computed after it
            computed_at = None if repeats_token else call.output_at
            self._costs.prompt_read(call.link.worker, ledger, (computed_at or time.perf_counter()) - call.sent_at)
        if call.estimate is None or state.hashes is None:
            return
        cached, size = call.estimate.cached, state.hashes.grain
        num_found = ledger.num_cached_tokens - cached.own
        host_id = call.link.worker.info.host_id
        self._costs.stores.used(host_id, cached.host, num_found)
        if num_found >= cached.host:  # else what is missing may be the worker's own, or its host's
            self._costs.stores.used_from_afar(cached.remote_host, host_id, cached.remote, num_found - cached.host)
        num_missing = cached.host + cached.remote - max(0, num_found)
        if cached.remote and num_missing > 0:
            end = (cached.own + cached.host + cached.remote) // size
            first = end - min(num_missing, cached.remote) // size
            blocks = state.hashes.followed_by(_answer_before(state, call))
            space = index_space(call.link.worker)
            self._prefixes.forget(blocks[first:end], cached.remote_host, first, space)

    def finished(self, state: RequestState) -> None:
        """Every token was delivered: record how long the hand-over took."""
        prefill, decode, writer = state.prefill, state.choices[0].call, state.writer
        if prefill is None or decode is None or writer is None or decode.ledger is None or prefill.ledger is None:
            return
        took_ms = hand_over_ms(prefill, decode)
        if took_ms is not None:
            reader, num_bytes = decode.link.worker, decode.ledger.num_bytes_pulled
            self._costs.handed_over(writer, prefill.ledger, reader, num_bytes, took_ms)

    def closed(self, state: RequestState) -> None:
        """The request has ended: its answers' blocks are at the workers that generated them.

        An answer's last token has no KV. An answer of one token may come from prefill alone.
        """
        hashes = state.hashes
        if hashes is None:
            return
        stores: dict[str, str] = {}
        workers: dict[str, Worker] = {}
        for choice in state.choices:
            call = choice.call
            if call is None or not call.has_output or len(choice.tokens) < 2:
                continue
            if call.incarnation not in stores:
                stores[call.incarnation] = self._store_of(call)
                workers[call.incarnation] = call.link.worker
            answer = state.hashes_after_prompt(choice.tokens[:-1])
            self._learn_answer(hashes, answer, call.link.worker, stores[call.incarnation])
        for worker in workers.values():  # after the answers: of a chain, the last blocks are dropped first
            self._learn_prompt(hashes, worker, "")

    def _learn_prompt(self, hashes: PromptHashes, worker: Worker, host_id: str) -> None:
        if not self._registry.is_here(worker):  # nobody would tell the index that the pool is gone
            return
        blocks = hashes.blocks[: hashes.max_left_blocks]
        self._prefixes.learn(blocks, worker.incarnation, host_id, 0, index_space(worker), is_told=_is_told(worker))

    def _learn_answer(self, hashes: PromptHashes, block_hashes: Sequence[bytes], worker: Worker, host_id: str) -> None:
        """A worker has these blocks after the prompt's; later requests may find them if nothing bounds what is left."""
        if hashes.max_left_blocks is None and self._registry.is_here(worker):
            first, space = len(hashes.blocks), index_space(worker)
            self._prefixes.learn(block_hashes, worker.incarnation, host_id, first, space, is_told=_is_told(worker))

    def _store_of(self, call: WorkerCall) -> str:
        """Return the host whose block store the worker offers its blocks to, "" if there is none."""
        host_id = call.link.worker.info.host_id
        return host_id if self._registry.store_of(host_id) else ""


def _is_told(worker: Worker) -> bool:
    """Return whether the block events of its host tell of what a worker stores; not of release 0.2."""
    return worker.info.card.takes_spaces


def _answer_before(state: RequestState, call: WorkerCall) -> Sequence[bytes]:
    """Return the hashes of an answer's blocks that a call began with, in the fleet's grain."""
    if not call.submit.space:  # of release 0.2: the Submit has that worker's own hashes
        return state.hashes_after_prompt(call.submit.token_ids)
    return call.submit.block_hashes


def hand_over_ms(prefill: WorkerCall, decode: WorkerCall) -> float | None:
    """Return the time from prefill's first token, or from when decode had the request if that was later, until decode
    had the blocks; None: nothing was handed over.

    The clocks of the two hosts count as one unless this gateway's own clock shows that they differ.
    """
    written, read = prefill.ledger, decode.ledger
    if written is None or read is None or not (written.first_token_ns and read.transfer_end_ns):
        return None
    of_prefill = _ahead(prefill.sent_at, written.submitted_ns, written.first_token_ns, prefill.output_at)
    # Decode's first output repeats prefill's token, before its engine has sampled any.
    first_ns, last_ns = read.submitted_ns or read.transfer_start_ns, read.finished_ns or read.transfer_end_ns
    of_decode = _ahead(decode.sent_at, first_ns, last_ns, decode.closed_at)
    least, most = of_decode.least - of_prefill.most, of_decode.most - of_prefill.least
    ahead = 0.0 if least <= 0 <= most else (least + most) / 2  # decode's clock, of prefill's
    begun_at = max(written.first_token_ns / 1e9 + ahead, read.submitted_ns / 1e9)
    return 1000.0 * max(0.0, read.transfer_end_ns / 1e9 - begun_at)


class _Ahead(NamedTuple):
    """By how many seconds a worker's clock is ahead of `time.perf_counter` here."""

    least: float
    most: float


def _ahead(sent_at: float, first_ns: int, last_ns: int, heard_at: float | None) -> _Ahead:
    """Return what a call shows of its worker's clock: nothing was done before it was sent, or after the gateway heard.

    `first_ns`, `last_ns`: times of the worker, 0 if there is none; of the last one it told at `heard_at` at the latest.
    """
    least = last_ns / 1e9 - heard_at if last_ns and heard_at is not None else -math.inf
    return _Ahead(least, first_ns / 1e9 - sent_at if first_ns else math.inf)


class ReadinessProofs:
    """When a request of each model last passed every phase; for /readyz. The dispatcher writes, the prober reads."""

    def __init__(self, registry: WorkerRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._proven_at: dict[tuple[str, bool], float] = {}
        self._refusals: dict[str, str] = {}
        registry.listen(self._forget_unserved)

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Iterate over model id and `handed_over` of all proofs."""
        return iter(self._proven_at)

    def record(self, model_id: str, handed_over: bool, refusal: TandemError | None = None) -> None:
        """A request has passed every phase; `handed_over`: its cache moved from prefill to decode.

        `refusal`: the answer of the first full worker that a probe met.
        """
        self._refusals.pop(model_id, None)
        if refusal is not None and not handed_over:
            self._refusals[model_id] = refusal.message
        kind = model_id, handed_over
        if kind in self._proven_at:  # once more: nothing else changes, and `age` looks at all workers of the model
            self._proven_at[kind] = self._clock()
            return
        was_proven = self.age(model_id) is not None
        self._proven_at[kind] = self._clock()
        if not was_proven and self.age(model_id) is not None:
            log.info("model_ready", model=model_id, handed_over=handed_over)

    def age(self, model_id: str) -> float | None:
        """Return the seconds since the latest proof; None: there is no proof.

        If the model has a prefill worker, only a request that was handed over is a proof.
        """
        kinds = (True,) if self._has_prefill(model_id) else (True, False)
        proven_at = [self._proven_at[model_id, kind] for kind in kinds if (model_id, kind) in self._proven_at]
        return self._clock() - max(proven_at) if proven_at else None

    def refusal(self, model_id: str) -> str:
        """Return why the last probe was not handed over, if its prefill workers were full; else ""."""
        return self._refusals.get(model_id, "")

    def served(self) -> list[str]:
        """Return the models of ready decode workers."""
        return [model_id for model_id in self._registry.model_ids() if self._registry.serves(model_id)]

    def _has_prefill(self, model_id: str) -> bool:
        """Return whether prompts can be handed over: only within a group of workers that share KV blocks."""
        workers = [worker for worker in self._registry.workers_of(model_id) if worker.is_usable]
        spaces = {worker.space for worker in workers if worker.role == pb.WORKER_ROLE_DECODE}
        return any(
            worker.role == pb.WORKER_ROLE_PREFILL
            and worker.info.kv_address in self._registry.kv_addresses()
            and worker.space in spaces
            for worker in workers
        )

    def _forget_unserved(self, worker: Worker, is_here: bool) -> None:
        """A model whose decode workers are all gone needs a new proof once one is back."""
        unserved = [kind for kind in self._proven_at if not self._registry.serves(kind[0])]
        for kind in unserved:
            del self._proven_at[kind]
            self._refusals.pop(kind[0], None)

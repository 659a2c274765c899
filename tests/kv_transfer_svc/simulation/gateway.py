"""A simulated gateway: mints handles, submits requests and recovers them from lost workers.

Restates the rules of control_plane.dispatch over the real links and KV clients:

- Prefill and decode are submitted together.
- If prefill fails, its handle is aborted, so that decode computes the prompt itself.
- If decode fails, its reader is released. The request continues on another worker with the tokens so far, and then
  without a handle.
- If a request ends with an open submission, its handle is released.
- Every fourth request is sent as by a gateway of release 0.2, without a space.
- The gateway never gives up before the deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from control_plane.fleet.kv_clients import KvClients
from control_plane.fleet.registry import Worker
from control_plane.fleet.worker_links import WorkerLink
from tandem.v1 import types_pb2 as pb
from tandem_engine.scheduling.block_hash import hash_blocks, hash_root
from tandem_runtime.errors import InvalidRequest, Overloaded, TandemError, Unavailable
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.spaces import model_identity, space_of
from tandem_worker.model_card import fingerprint, kv_layout
from tests.kv_transfer_svc.simulation.client_requests import Choice, SimulatedRequest, Submission
from tests.kv_transfer_svc.simulation.engine import LAYOUT, MODEL
from tests.kv_transfer_svc.simulation.fleet import GATEWAY_HOST, Fleet
from tests.kv_transfer_svc.simulation.lives import SIGNER, Environment, KvLife, Life, WorkerLife
from tests.kv_transfer_svc.simulation.tokens import TOKENS_PER_BLOCK, answer_to
from tests.kv_transfer_svc.simulation.virtual_loop import Process

_PAUSE_SECONDS = 0.3
_BEAT_SECONDS = 1.0  # all of virtual time
_GRACE_SECONDS = 1.0
DEADLINE_SLACK_SECONDS = _GRACE_SECONDS + 0.5
_FINGERPRINT = fingerprint(MODEL).digest
_MODEL = pb.ModelRef(model_id=MODEL.model_id, fingerprint=_FINGERPRINT)
_LAYOUT_DIGEST = layout_digest(kv_layout(LAYOUT))
_SPACE = space_of(pb.ModelCard(fingerprint=fingerprint(MODEL), layout=kv_layout(LAYOUT)))
_GRAIN = TOKENS_PER_BLOCK // 2
_ROOT = hash_root(model_identity(fingerprint(MODEL)), _GRAIN)
_ROOT_0_2 = hash_root(_FINGERPRINT, TOKENS_PER_BLOCK)


class Gateway:
    """A process that is never killed: clients see the death of a gateway, and of nothing else."""

    def __init__(self, around: Environment, fleet: Fleet) -> None:
        self.process = Process("gateway", GATEWAY_HOST, around.loop)
        self.requests: dict[str, SimulatedRequest] = {}
        """Requests in progress."""
        self.kv_clients = KvClients("gateway-1")
        self._around = around
        self._fleet = fleet
        self._rng: random.Random = around.rng
        self._links: dict[str, WorkerLink] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._number = 0
        fleet.on_change = self._changed
        self.process.call(self._begin)

    # ------------------------------------------------------------------------------------ the driver's calls

    def submit(self, prompt: list[int], max_tokens: int, num_choices: int, seconds: float) -> None:
        self._number += 1
        name = f"q{self._number}"
        deadline = self._around.time.time() + seconds
        choices = [Choice(index, answer_to(prompt, max_tokens)) for index in range(num_choices)]
        request = self.requests[name] = SimulatedRequest(name, prompt, max_tokens, deadline, choices)
        self.process.call(self._start, request)

    def cancel(self, name: str) -> None:
        def cancel() -> None:
            request = self.requests.get(name)
            if request is not None and request.task is not None:
                request.task.cancel()

        self.process.call(cancel)

    # --------------------------------------------------------------------------------------- workers' output

    def take(self, request: SimulatedRequest, output: pb.TokenOutput) -> None:
        """Merge by position, as `request_stream` does; every token must equal that of an undisturbed run."""
        choice = request.choices[output.choice_index]
        first = output.position - len(request.prompt)
        token_ids = list(output.token_ids)
        if choice.expected[first : first + len(token_ids)] != token_ids:
            self._around.truth.violated(
                f"{request.name}: tokens {token_ids} at {first} where {choice.expected} was right"
            )
        fresh = token_ids[max(0, len(choice.tokens) - first) :]
        if first > len(choice.tokens):
            self._around.truth.violated(f"{request.name}: tokens at {first}, only {len(choice.tokens)} came before")
        choice.tokens += fresh

    # ----------------------------------------------------------------------------------------------- requests

    def _begin(self) -> None:
        self._spawn(self._beat())

    async def _beat(self) -> None:
        while True:
            self._fleet.beat()
            await asyncio.sleep(_BEAT_SECONDS)

    def _start(self, request: SimulatedRequest) -> None:
        request.task = self._spawn(self._run(request))

    async def _run(self, request: SimulatedRequest) -> None:
        try:
            async with asyncio.timeout(self._seconds_left(request) + _GRACE_SECONDS):
                await self._both_halves(request)
            request.outcome = "completed"
        except TimeoutError:
            request.outcome = "deadline"
        except asyncio.CancelledError:
            request.outcome = "cancelled"
        finally:
            self._end(request)

    def _end(self, request: SimulatedRequest) -> None:
        del self.requests[request.name]
        self._around.truth.counts[f"requests {request.outcome}"] += 1
        is_unfinished = bool(request.open_submissions) or request.attempt > 0
        for submission in list(request.open_submissions):
            submission.close()
        if is_unfinished and request.handle is not None:
            self._spawn(self.kv_clients.release_all(request.handle, self._seconds_left(request)))

    async def _both_halves(self, request: SimulatedRequest) -> None:
        prefill = self._pick(pb.WORKER_ROLE_PREFILL)
        request.handle = self._mint(request, prefill) if prefill is not None else None
        halves = [self._run_choice(request, choice) for choice in request.choices]
        if prefill is not None and request.handle is not None:
            halves.append(self._run_prefill(request, prefill))
        tasks = [asyncio.ensure_future(half) for half in halves]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_prefill(self, request: SimulatedRequest, worker: WorkerLife) -> None:
        submit = self._submit(request)
        submit.choice_seeds.extend(range(1, len(request.choices) + 1))
        assert request.handle is not None, "prefill is submitted only with a handle"
        submit.handle.CopyFrom(request.handle)
        error = await Submission(self.take, request, self._links[worker.info.incarnation], submit).run()
        if error is not None:
            self._note_failure(request, "prefill", error)
            self._spawn(self.kv_clients.abort(request.handle, error, self._seconds_left(request)))

    async def _run_choice(self, request: SimulatedRequest, choice: Choice) -> None:
        while not choice.is_over:
            worker = self._pick(pb.WORKER_ROLE_DECODE)
            error: TandemError | None = Unavailable("no decode worker is known")
            if worker is not None:
                submit = self._decode_submit(request, choice)
                error = await Submission(self.take, request, self._links[worker.info.incarnation], submit).run()
            if error is None:
                continue
            request.attempt += 1
            self._note_failure(request, "decode", error)
            if request.handle is not None and worker is not None and not isinstance(error, Overloaded):
                reader_id, left = f"{request.name}-{choice.index}", self._seconds_left(request)
                self._spawn(self.kv_clients.release(request.handle, reader_id, left))
            await asyncio.sleep(_PAUSE_SECONDS)

    def _seconds_left(self, request: SimulatedRequest) -> float:
        return request.deadline - self._around.time.time()

    def _note_failure(self, request: SimulatedRequest, half: str, error: TandemError) -> None:
        self._around.truth.counts[f"{half} legs ended by {type(error).__name__}"] += 1
        if isinstance(error, InvalidRequest):
            self._around.truth.violated(f"{request.name}: {half} refused it: {error.message}")

    # ------------------------------------------------------------------------------------------- what is sent

    def _pick(self, role: pb.WorkerRole.ValueType) -> WorkerLife | None:
        usable = [worker for worker in self._fleet.usable(role) if worker.info.incarnation in self._links]
        return self._rng.choice(usable) if usable else None

    def _mint(self, request: SimulatedRequest, prefill: WorkerLife) -> pb.KvHandle | None:
        holder = self._fleet.holder(prefill.kv_address)
        if holder is None:
            return None
        handle = pb.KvHandle(
            handle_id=self._rng.randbytes(16),
            request_id=request.name,
            attempt=request.attempt,
            prefill_incarnation=prefill.info.incarnation,
            holder_address=holder.address,
            holder_incarnation=holder.incarnation,
            holder_id=holder.worker_id,
            model=_MODEL,
            layout_digest=_LAYOUT_DIGEST,
            num_tokens=len(request.prompt),
            num_readers=len(request.choices),
            deadline_unix_ms=int(request.deadline * 1000),
        )
        return SIGNER.sign(handle)

    def _submit(self, request: SimulatedRequest, so_far: list[int] | None = None) -> pb.Submit:
        token_ids = request.prompt + (so_far or [])
        sources = [life.info.address for life in self._fleet.kv_services] if self._rng.random() < 0.3 else []
        is_of_0_2 = sum(request.name.encode()) % 4 == 0
        root, grain = (_ROOT_0_2, TOKENS_PER_BLOCK) if is_of_0_2 else (_ROOT, _GRAIN)
        return pb.Submit(
            request_id=request.name,
            attempt=request.attempt,
            model=_MODEL,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt),
            hash_root=root,
            block_hashes=hash_blocks(root, token_ids, grain),
            space=b"" if is_of_0_2 else _SPACE,
            hash_grain=0 if is_of_0_2 else grain,
            sampling=pb.SamplingParams(max_tokens=request.max_tokens, top_p=1, repetition_penalty=1),
            deadline_unix_ms=int(request.deadline * 1000),
            prefix_source=self._rng.choice(sources) if sources else "",
        )

    def _decode_submit(self, request: SimulatedRequest, choice: Choice) -> pb.Submit:
        submit = self._submit(request, choice.tokens)
        submit.request_id = f"{request.name}-{choice.index}"
        submit.choice_index = choice.index
        if request.handle is not None and not choice.tokens:
            submit.handle.CopyFrom(request.handle)
        return submit

    # ------------------------------------------------------------------------------------------------ helpers

    def _changed(self, life: Life, is_here: bool) -> None:
        worker = Worker(life.info, pb.LoadReport(), 0.0)
        if isinstance(life, KvLife):
            self.kv_clients.changed(worker, is_here)
        elif is_here:
            self._links[life.info.incarnation] = WorkerLink(worker, "gateway", "gateway-1")
        else:
            self._spawn(self._links.pop(life.info.incarnation).close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

"""Who mints the handles, and goes on with a request whose worker was lost?

The rules of control_plane.dispatch, restated over the real links and KV clients: both halves are
submitted together; a prefill that fails has its handle aborted, so that decode computes the prompt itself; a decode
that fails has its reader released and the request goes on elsewhere, with the tokens so far and then without a handle;
what is over with something of it still open has its handle released. It never gives up before the deadline.
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
from tandem_runtime.kv.mac import sign_handle
from tandem_worker.card import fingerprint, kv_layout
from tests.kv_transfer_svc.simulation.engine import LAYOUT, MODEL
from tests.kv_transfer_svc.simulation.fleet import GATEWAY_HOST, Fleet
from tests.kv_transfer_svc.simulation.legs import Asked, Choice, Leg
from tests.kv_transfer_svc.simulation.lives import KEY, KvLife, Life, Surroundings, WorkerLife
from tests.kv_transfer_svc.simulation.tokens import TOKENS_PER_BLOCK, answer_to
from tests.kv_transfer_svc.simulation.virtual_loop import Process

_PAUSE_SECONDS = 0.3
_BEAT_SECONDS = 1.0  # all of virtual time
_GRACE_SECONDS = 1.0
DEADLINE_SLACK_SECONDS = _GRACE_SECONDS + 0.5
_FINGERPRINT = fingerprint(MODEL).digest
_MODEL = pb.ModelRef(model_id=MODEL.model_id, fingerprint=_FINGERPRINT)
_ROOT = hash_root(_FINGERPRINT, TOKENS_PER_BLOCK)
_LAYOUT_DIGEST = layout_digest(kv_layout(LAYOUT))


class Gateway:
    """A process that is never killed: its death is the one thing that a client sees."""

    def __init__(self, around: Surroundings, fleet: Fleet) -> None:
        self.process = Process("gateway", GATEWAY_HOST, around.loop)
        self.asked: dict[str, Asked] = {}
        """Requests that are not over."""
        self.kv_clients = KvClients("gateway-1")
        self._around = around
        self._fleet = fleet
        self._rng: random.Random = around.rng
        self._links: dict[str, WorkerLink] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._number = 0
        fleet.on_change = self._changed
        self.process.call(self._begin)

    # ------------------------------------------------------------------------------------ what the driver asks

    def submit(self, prompt: list[int], max_tokens: int, num_choices: int, seconds: float) -> None:
        self._number += 1
        name = f"q{self._number}"
        deadline = self._around.time.time() + seconds
        choices = [Choice(index, answer_to(prompt, max_tokens)) for index in range(num_choices)]
        asked = self.asked[name] = Asked(name, prompt, max_tokens, deadline, choices)
        self.process.call(self._start, asked)

    def cancel(self, name: str) -> None:
        def cancel() -> None:
            asked = self.asked.get(name)
            if asked is not None and asked.task is not None:
                asked.task.cancel()

        self.process.call(cancel)

    # --------------------------------------------------------------------------------------- what workers say

    def take(self, asked: Asked, output: pb.TokenOutput) -> None:
        """Merge by position, as `request_stream` does; every token must be that of an undisturbed run."""
        choice = asked.choices[output.choice_index]
        first = output.position - len(asked.prompt)
        given = list(output.token_ids)
        if choice.expected[first : first + len(given)] != given:
            self._around.truth.violated(f"{asked.name}: tokens {given} at {first} where {choice.expected} was right")
        fresh = given[max(0, len(choice.tokens) - first) :]
        if first > len(choice.tokens):
            self._around.truth.violated(f"{asked.name}: tokens at {first}, only {len(choice.tokens)} came before")
        choice.tokens += fresh

    # ----------------------------------------------------------------------------------------------- requests

    def _begin(self) -> None:
        self._spawn(self._hear())

    async def _hear(self) -> None:
        while True:
            self._fleet.beat()
            await asyncio.sleep(_BEAT_SECONDS)

    def _start(self, asked: Asked) -> None:
        asked.task = self._spawn(self._run(asked))

    async def _run(self, asked: Asked) -> None:
        try:
            async with asyncio.timeout(asked.deadline + _GRACE_SECONDS - self._around.time.time()):
                await self._both_halves(asked)
            asked.outcome = "completed"
        except TimeoutError:
            asked.outcome = "deadline"
        except asyncio.CancelledError:
            asked.outcome = "cancelled"
        finally:
            self._end(asked)

    def _end(self, asked: Asked) -> None:
        del self.asked[asked.name]
        self._around.truth.counts[f"requests {asked.outcome}"] += 1
        is_unfinished = bool(asked.open_legs) or asked.attempt > 0
        for leg in list(asked.open_legs):
            leg.close()
        if is_unfinished and asked.handle is not None:
            self._spawn(self.kv_clients.release_all(asked.handle))

    async def _both_halves(self, asked: Asked) -> None:
        prefill = self._pick(pb.WORKER_ROLE_PREFILL)
        asked.handle = self._mint(asked, prefill) if prefill is not None else None
        halves = [self._run_choice(asked, choice) for choice in asked.choices]
        if prefill is not None and asked.handle is not None:
            halves.append(self._run_prefill(asked, prefill))
        tasks = [asyncio.ensure_future(half) for half in halves]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_prefill(self, asked: Asked, worker: WorkerLife) -> None:
        submit = self._submit(asked)
        submit.choice_seeds.extend(range(1, len(asked.choices) + 1))
        assert asked.handle is not None, "prefill without a handle has nobody to compute for"
        submit.handle.CopyFrom(asked.handle)
        error = await Leg(self.take, asked, self._links[worker.info.incarnation], submit).run()
        if error is not None:
            self._note_failure(asked, "prefill", error)
            self._spawn(self.kv_clients.abort(asked.handle, error))

    async def _run_choice(self, asked: Asked, choice: Choice) -> None:
        while not choice.is_over:
            worker = self._pick(pb.WORKER_ROLE_DECODE)
            error: TandemError | None = Unavailable("no decode worker is known")
            if worker is not None:
                submit = self._decode_submit(asked, choice)
                error = await Leg(self.take, asked, self._links[worker.info.incarnation], submit).run()
            if error is None:
                continue
            asked.attempt += 1
            self._note_failure(asked, "decode", error)
            if asked.handle is not None and worker is not None and not isinstance(error, Overloaded):
                self._spawn(self.kv_clients.release(asked.handle, f"{asked.name}-{choice.index}"))
            await asyncio.sleep(_PAUSE_SECONDS)

    def _note_failure(self, asked: Asked, half: str, error: TandemError) -> None:
        self._around.truth.counts[f"{half} legs ended by {type(error).__name__}"] += 1
        if isinstance(error, InvalidRequest):
            self._around.truth.violated(f"{asked.name}: {half} refused it: {error.message}")

    # ------------------------------------------------------------------------------------------- what is sent

    def _pick(self, role: pb.WorkerRole.ValueType) -> WorkerLife | None:
        usable = [worker for worker in self._fleet.usable(role) if worker.info.incarnation in self._links]
        return self._rng.choice(usable) if usable else None

    def _mint(self, asked: Asked, prefill: WorkerLife) -> pb.KvHandle | None:
        holder = self._fleet.holder(prefill.kv_address)
        if holder is None:
            return None
        handle = pb.KvHandle(
            handle_id=self._rng.randbytes(16),
            request_id=asked.name,
            attempt=asked.attempt,
            prefill_incarnation=prefill.info.incarnation,
            holder_address=holder.address,
            holder_incarnation=holder.incarnation,
            model=_MODEL,
            layout_digest=_LAYOUT_DIGEST,
            num_tokens=len(asked.prompt),
            num_readers=len(asked.choices),
            deadline_unix_ms=int(asked.deadline * 1000),
        )
        return sign_handle(handle, KEY)

    def _submit(self, asked: Asked, so_far: list[int] | None = None) -> pb.Submit:
        token_ids = asked.prompt + (so_far or [])
        sources = [life.info.address for life in self._fleet.kv_services] if self._rng.random() < 0.3 else []
        return pb.Submit(
            request_id=asked.name,
            attempt=asked.attempt,
            model=_MODEL,
            token_ids=token_ids,
            num_prompt_tokens=len(asked.prompt),
            hash_root=_ROOT,
            block_hashes=hash_blocks(_ROOT, token_ids, TOKENS_PER_BLOCK),
            sampling=pb.SamplingParams(max_tokens=asked.max_tokens, top_p=1, repetition_penalty=1),
            deadline_unix_ms=int(asked.deadline * 1000),
            prefix_source=self._rng.choice(sources) if sources else "",
        )

    def _decode_submit(self, asked: Asked, choice: Choice) -> pb.Submit:
        submit = self._submit(asked, choice.tokens)
        submit.request_id = f"{asked.name}-{choice.index}"
        submit.choice_index = choice.index
        if asked.handle is not None and not choice.tokens:
            submit.handle.CopyFrom(asked.handle)
        return submit

    # ------------------------------------------------------------------------------------------------ workings

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

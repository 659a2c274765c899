"""A real gRPC server that implements all of Attach and behaves as a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from control_plane.fleet.registry import WorkerRegistry
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.errors import Cancelled, KvNotFound, StaleIncarnation, TandemError
from tandem_runtime.kv.spaces import space_of
from tandem_runtime.kv.table_parts import answer_parts
from tandem_runtime.server import GrpcServer

MODEL = "tiny"
FINGERPRINT = b"f" * 16
DECODE, PREFILL = pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL


def token_at(position: int) -> int:
    """Return the token at a position: here a token is a function of its position only."""
    return 1000 + position


class AttachStream:
    """One gateway's Attach stream, on which a behaviour answers."""

    def __init__(self, grant_with_refusal: pb.Grant | None = None) -> None:
        self.events: asyncio.Queue[pb.Event | TandemError | None] = asyncio.Queue()
        self._grant_with_refusal = grant_with_refusal

    def grant(self, grant: pb.Grant) -> None:
        self._put(grant=grant)

    def accept(self, submit: pb.Submit) -> None:
        self._put(accepted=pb.Accepted(request_id=submit.request_id, attempt=submit.attempt))

    def refuse(self, submit: pb.Submit, error: TandemError) -> None:
        detail = error.to_proto()
        grant = self._grant_with_refusal
        self._put(refused=pb.Refused(request_id=submit.request_id, attempt=submit.attempt, error=detail, grant=grant))

    def fail(self, submit: pb.Submit | pb.Cancel, error: TandemError, ledger: pb.PhaseLedger | None = None) -> None:
        detail = error.to_proto()
        self._put(failed=pb.Failed(request_id=submit.request_id, attempt=submit.attempt, error=detail, ledger=ledger))

    def tokens(self, submit: pb.Submit, position: int, token_ids: Sequence[int], **fields: Any) -> None:
        output = pb.TokenOutput(
            request_id=submit.request_id, attempt=submit.attempt, position=position, token_ids=token_ids, **fields
        )
        self._put(step=pb.StepBatch(step=1, outputs=[output]))

    def tables(self, question: pb.AskTables, reply: TablesReply) -> None:
        for part in answer_parts(question, lambda max_rows: reply):
            self._put(tables=part)

    def _put(self, **kind: Any) -> None:
        self.events.put_nowait(pb.Event(**kind))


Behaviour = Callable[["ScriptedWorker", AttachStream, pb.Submit], Awaitable[None]]


async def serve(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    """Accept, and send all tokens."""
    attach.accept(submit)
    await finish(worker, attach, submit)


async def finish(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    if worker.role == PREFILL:
        ledger = pb.PhaseLedger(num_prompt_tokens=submit.num_prompt_tokens, num_computed_tokens=len(submit.token_ids))
        for index in range(len(submit.choice_seeds)):
            first = len(submit.token_ids)
            attach.tokens(submit, first, [token_at(first)], choice_index=index, ledger=ledger)
        return
    start, end = len(submit.token_ids), submit.num_prompt_tokens + submit.sampling.max_tokens
    for position in range(start, end):
        is_last = position == end - 1
        ledger = pb.PhaseLedger(num_generated_tokens=end - start - worker.num_repeated_tokens)
        last = {"finish_reason": pb.FINISH_REASON_LENGTH, "ledger": ledger}
        attach.tokens(submit, position, [token_at(position)], **(last if is_last else {}))


async def silent(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    """Never answer."""


async def only_accept(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
    attach.accept(submit)


def refuse_with(error: TandemError) -> Behaviour:
    async def refuse(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.refuse(submit, error)

    return refuse


def lose_after(num_tokens: int) -> Behaviour:
    """Accept, send some tokens, and break the stream."""

    async def lose(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        first = len(submit.token_ids)
        attach.tokens(submit, first, [token_at(first + i) for i in range(num_tokens)])
        attach.events.put_nowait(None)

    return lose


def fail_after(num_tokens: int, error: TandemError) -> Behaviour:
    async def fail(worker: ScriptedWorker, attach: AttachStream, submit: pb.Submit) -> None:
        attach.accept(submit)
        first = len(submit.token_ids)
        attach.tokens(submit, first, [token_at(first + i) for i in range(num_tokens)])
        attach.fail(submit, error)

    return fail


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A prefill or decode worker; `behave` is run for every Submit."""

    def __init__(
        self,
        worker_id: str,
        role: pb.WorkerRole.ValueType = DECODE,
        behave: Behaviour = serve,
        life: int = 0,
        member: FleetMember | None = None,
        **card: Any,
    ) -> None:
        """`card`: fields of its model card; `numerics_class` is one of the fingerprint."""
        self._card = {
            "takes_spaces": True,
            "numerics_class": "cpu/float32/lean",
            "digest": FINGERPRINT,
            **card,
        }
        self.worker_id = worker_id
        self._member = member
        self.incarnation = f"{worker_id}-life-{life}"
        self.role = role
        self.behave = behave
        self.submits: list[pb.Submit] = []
        self.takes_choices = True
        self.answers_tables = True
        """Whether it answers questions for its tables on its streams."""
        self.tables = TablesReply(incarnation=self.incarnation)
        self.questions: list[pb.AskTables] = []
        self.num_table_calls = 0
        self.sends_tables = True
        """False: it never answers a question."""
        self.grant: pb.Grant | None = None
        """What it grants to a gateway that attaches; None: it uses no grants."""
        self.grant_with_refusal: pb.Grant | None = None
        self.demands: list[pb.Demand] = []
        self.reads: list[pb.EventsRead] = []
        self.max_num_seqs: int | None = None
        """What the worker says that it runs at once."""
        self.model_id = MODEL
        self.num_prompts_read = 0
        """How many prompts came, of one or several requests each."""
        self.cancels: list[pb.Cancel] = []
        self.num_computed_tokens: int | None = None
        """What the worker reports as computed when a request is cancelled; None: it reports nothing."""
        self.num_repeated_tokens = 0
        """How many tokens at the head of its answers the worker reports as sampled by prefill."""
        self.hellos: list[pb.AttachHello] = []
        self.streams: list[AttachStream] = []
        self.pool = pb.KvPool(num_total_blocks=100, num_free_blocks=100, tokens_per_block=16)
        self.changed = asyncio.Condition()
        self._running: set[asyncio.Task[None]] = set()
        self._server: GrpcServer | None = None
        self.address = ""

    @property
    def waiting(self) -> pb.WaitingRequests:
        """What the gateway has reported last."""
        reported = [demand.waiting for demand in self.demands if demand.HasField("waiting")]
        return reported[-1] if reported else pb.WaitingRequests()

    async def start(self) -> ScriptedWorker:
        add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        self._server = GrpcServer("127.0.0.1:0", lambda server: add(self, server), [], member=self._member)
        self.address = await self._server.start()
        return self

    async def kill(self) -> None:
        assert self._server is not None, "started"
        await self._server.stop(0)

    async def Attach(self, request_iterator: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        attach = AttachStream(self.grant_with_refusal)
        self.streams.append(attach)
        reader = asyncio.create_task(self._read(attach, request_iterator))
        try:
            while (event := await attach.events.get()) is not None:
                if isinstance(event, TandemError):
                    raise event
                yield event
        finally:
            reader.cancel()

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        raise KvNotFound("a scripted worker has no files")
        yield

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(info=self.info(), load=self.load())

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        self.num_table_calls += 1
        return self.tables

    async def until(self, condition: Callable[[ScriptedWorker], bool]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: condition(self))

    def info(self, **changes: Any) -> pb.WorkerInfo:
        fields = dict(self._card)
        fingerprint = pb.Fingerprint(digest=fields.pop("digest"), numerics_class=fields.pop("numerics_class"))
        card = pb.ModelCard(
            **{
                "model_id": self.model_id,
                "fingerprint": fingerprint,
                "block_size": 16,
                "context_length": 512,
                **fields,
            }
        )
        settings = {} if self.max_num_seqs is None else {"max_num_seqs": str(self.max_num_seqs)}
        values = {"settings": settings, "host_id": "host-a", "kv_address": "127.0.0.1:1", "card": card, **changes}
        return pb.WorkerInfo(
            worker_id=self.worker_id, incarnation=self.incarnation, role=self.role, address=self.address, **values
        )

    @property
    def numerics_class(self) -> str:
        return str(self._card["numerics_class"])

    @numerics_class.setter
    def numerics_class(self, name: str) -> None:
        self._card["numerics_class"] = name

    @property
    def space(self) -> bytes:
        return space_of(self.info().card)

    def load(self, state: pb.WorkerState.ValueType = pb.WORKER_STATE_READY, **fields: Any) -> pb.LoadReport:
        return pb.LoadReport(state=state, kv=self.pool, **fields)

    def register(self, registry: WorkerRegistry) -> ScriptedWorker:
        registry.register(self.info(), self.load())
        return self

    async def _read(self, attach: AttachStream, commands: AsyncIterator[pb.Command]) -> None:
        async for command in commands:
            async with self.changed:
                self._handle(attach, command)
                self.changed.notify_all()

    def _handle(self, attach: AttachStream, command: pb.Command) -> None:
        match command.WhichOneof("kind"):
            case "hello":
                self.hellos.append(command.hello)
                if command.hello.worker_incarnation != self.incarnation:
                    attach.events.put_nowait(StaleIncarnation("another life"))
                else:
                    hello = pb.AttachHello(worker_incarnation=self.incarnation, takes_choices=self.takes_choices)
                    hello.uses_grants = self.grant is not None
                    hello.answers_tables = self.answers_tables
                    attach.events.put_nowait(pb.Event(hello=hello))
                    if self.grant is not None:
                        attach.grant(self.grant)
            case "submit":
                self.num_prompts_read += bool(command.submit.token_ids)
                self._submit(attach, command.submit)
            case "choices":
                self.num_prompts_read += 1
                for choice in command.choices.choices:
                    submit = pb.Submit.FromString(command.choices.shared.SerializeToString())
                    submit.MergeFrom(choice)
                    self._submit(attach, submit)
            case "demand":
                self.demands.append(command.demand)
            case "read":
                self.reads.append(command.read)
            case "tables":
                self.questions.append(command.tables)
                if self.sends_tables:
                    attach.tables(command.tables, self.tables)
            case "cancel":
                self.cancels.append(command.cancel)
                if self.num_computed_tokens is not None:
                    ledger = pb.PhaseLedger(num_computed_tokens=self.num_computed_tokens)
                    attach.fail(command.cancel, Cancelled("the gateway cancelled the request"), ledger)

    def _submit(self, attach: AttachStream, submit: pb.Submit) -> None:
        self.submits.append(submit)
        task = asyncio.ensure_future(self.behave(self, attach, submit))
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def kv_service(name: str = "kv-0", address: str = "127.0.0.1:1", host_id: str = "host-a") -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=name, incarnation=f"{name}-life", role=pb.WORKER_ROLE_KV, address=address, host_id=host_id
    )


def kv_load() -> pb.LoadReport:
    """A KV service that is ready and has a store of blocks."""
    store = pb.KvServiceLoad(store=pb.KvStoreLoad(total_bytes=1 << 20))
    return pb.LoadReport(state=pb.WORKER_STATE_READY, kv_service=store)

"""Drains and resumes workers for an operator."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.accounts.errors import NoSuchThing
from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.fleet.status import worker_name
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.worker_pb2 import DrainReply, DrainRequest
from tandem_runtime.certificates.membership import FleetMember
from tandem_runtime.channel import open_worker_channel
from tandem_runtime.errors import InvalidRequest, StaleIncarnation, TandemError, Unavailable, Unsupported
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Drained:
    """What a worker does from now on."""

    worker: Worker
    name: str
    """Its --worker-id."""
    state: str
    """draining or ready."""
    is_last: bool
    """Whether no other worker of its role takes requests for its model."""


class WorkerDrain:
    """Asks workers of the registry to drain or to resume. The worker reports its state to all gateways."""

    def __init__(self, registry: WorkerRegistry, member: FleetMember | None = None) -> None:
        self._registry = registry
        self._member = member

    async def drain(self, name: str, *, resume: bool) -> Drained:
        """Drain the worker with this id or --worker-id.

        Raise NoSuchThing for an unknown one, InvalidRequest for one that cannot drain, Unavailable if it is silent.
        """
        worker = self.find(name)
        called = worker_name(worker.info)
        try:
            reply = await self._ask(worker, resume=resume)
        except Unsupported as error:
            raise Unsupported(
                f"{called} is of a release that cannot drain; upgrade it, or stop it with SIGTERM, which drains too",
                field="worker",
            ) from error
        except InvalidRequest as error:
            raise InvalidRequest(f"{called}: {error.message}", field="worker") from error
        except StaleIncarnation as error:
            raise Unavailable(f"{called} has just been started again; ask again", retry_after_seconds=1.0) from error
        except TandemError as error:
            log.warning("drain_failed", worker=worker.worker_id, error=error.log_text)
            raise Unavailable(
                f"{called} does not answer ({type(error).__name__}): ask again, or see whether its process still runs",
                retry_after_seconds=2.0,
            ) from error
        if resume:
            log.info("resume_requested", worker=worker.worker_id)
        else:
            log.info("drain_requested", worker=worker.worker_id)
        return Drained(
            worker,
            called,
            pb.WorkerState.Name(reply.state).removeprefix("WORKER_STATE_").lower(),
            not self._others(worker),
        )

    async def _ask(self, worker: Worker, *, resume: bool) -> DrainReply:
        async with open_worker_channel(worker.info, self._member) as channel:
            is_encoder = worker.role == pb.WORKER_ROLE_ENCODE
            stub = (worker_pb2_grpc.EncodeServiceStub if is_encoder else worker_pb2_grpc.WorkerServiceStub)(channel)
            request = DrainRequest(incarnation=worker.incarnation, resume=resume)
            reply: DrainReply = await stub.Drain(request, timeout=_ANSWER_SECONDS)
            return reply

    def find(self, name: str) -> Worker:
        """Return the worker with this id or --worker-id. Raise NoSuchThing, or InvalidRequest for a KV service."""
        workers = self._registry.workers()
        found = [each for each in workers if name in (each.worker_id, each.info.settings.get("worker_id"))]
        if len(found) != 1:
            why = "no worker has this id" if not found else f"{len(found)} workers have this name; use an id"
            raise NoSuchThing(f"{why}: {name[:128]!r}; GET /v1/workers lists them", field="worker")
        (worker,) = found
        if worker.role == pb.WORKER_ROLE_KV:
            raise InvalidRequest(
                f"{worker_name(worker.info)} is a KV service, which has no requests of its own to finish; drain the "
                f"workers of host {worker.info.host_id}, then stop it",
                field="worker",
            )
        return worker

    def consequence(self, drained: Drained) -> str:
        """Return what clients notice while the worker drains; "" if nothing."""
        model = drained.worker.info.card.model_id
        if drained.state != "draining" or not drained.is_last:
            return ""
        if drained.worker.role == pb.WORKER_ROLE_PREFILL and self._registry.serves(model):
            return f"it was the last prefill worker of {model}: decode workers compute prompts meanwhile"
        role = pb.WorkerRole.Name(drained.worker.role).removeprefix("WORKER_ROLE_").lower()
        return f"it was the last {role} worker of {model}: new requests wait some seconds, and are then refused"

    def _others(self, worker: Worker) -> list[Worker]:
        model = worker.info.card.model_id
        peers = self._registry.workers(worker.role)
        return [each for each in peers if each.worker_id != worker.worker_id and each.serves(model)]

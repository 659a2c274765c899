"""A decode worker without a model: emits tokens at once, behind the real protocol.

`python -m benchmarks.gateway.stand_in_worker CONTROL ...` registers at these gRPC addresses as a worker of the built-in
model. Each step gives every request one token; all requests of a gateway are in one StepBatch, as with an engine. Steps
follow each other as fast as the gateway reads, or every `--token-seconds`. A token is a function of its position, so a
reader can check the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gateway.seat_grants import SeatGrants
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem.v1.worker_pb2 import DrainReply, DrainRequest
from tandem_engine.demo import MODEL_ID, checkpoint_path
from tandem_runtime import identity, lifecycle, log
from tandem_runtime.errors import Overloaded, TandemError
from tandem_runtime.registration import Registrar
from tandem_runtime.server import GrpcServer
from tandem_runtime.virtual_counters import AnswerMeter

CONTEXT_LENGTH = 1 << 20
"""Tokens; an answer may be as long as a measurement."""
BLOCK_SIZE = 16
_NUM_BLOCKS = 1 << 30
_NUM_WORDS = 509
_NUM_TURNS = 16
"""With a pace, a sixteenth of the requests has a token in each step."""
_CHUNK_BYTES = 1 << 20
FIRST_TOKEN_SIGMA = 0.35
"""Of the logarithm of the time to the first token."""
MIN_FIRST_TOKEN_SECONDS = 0.005
_ASSETS = ("tokenizer.json", "tokenizer_config.json")


class Words:
    """The tokens of every answer: words of one token each, whole characters, in an order that positions give."""

    def __init__(self, folder: Path) -> None:
        vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        words = {token[1:]: token_id for token, token_id in vocabulary.items() if _is_word(token)}
        chosen = sorted(words, key=lambda word: words[word])[:_NUM_WORDS]
        self.token_ids = [words[word] for word in chosen]
        self.texts = [f" {word}" for word in chosen]

    def token_id(self, position: int) -> int:
        return self.token_ids[position % len(self.token_ids)]

    def text(self, first: int, num_tokens: int) -> str:
        """Return the text of an answer whose first token stands at position `first`."""
        return "".join(self.texts[place % len(self.texts)] for place in range(first, first + num_tokens))


def _is_word(token: str) -> bool:
    return token[0] == "Ġ" and len(token) > 2 and token[1:].isascii() and token[1:].isalpha()


def model_card(
    folder: Path | None = None, model_id: str = MODEL_ID, context_length: int = CONTEXT_LENGTH
) -> pb.ModelCard:
    """Return the card of a model, the built-in one by default, with room for longer answers; no weights are read."""
    folder = folder or checkpoint_path()
    config = json.loads((folder / "config.json").read_text())
    files = {name: (folder / name).read_bytes() for name in _ASSETS}
    assets = [
        pb.Asset(name=name, digest=hashlib.blake2b(content, digest_size=16).digest(), num_bytes=len(content))
        for name, content in files.items()
    ]
    return pb.ModelCard(
        model_id=model_id,
        fingerprint=pb.Fingerprint(
            weights_digest="stand-in",
            numerics_class="stand-in",
            digest=hashlib.blake2b(model_id.encode(), digest_size=16).digest(),
        ),
        block_size=BLOCK_SIZE,
        context_length=context_length,
        vocab_size=config["vocab_size"],
        eos_token_ids=[config["eos_token_id"]],
        chat_template=(folder / "chat_template.jinja").read_text(),
        assets=assets,
        architecture=config["architectures"][0],
        created_unix_seconds=int(time.time()),
        task="text-generation",
    )


def asset_chunks(folder: Path, card: pb.ModelCard, digest: bytes) -> Iterator[pb.Chunk]:
    """Yield a file of the card's model."""
    (name,) = [asset.name for asset in card.assets if asset.digest == digest]
    content = (folder / name).read_bytes()
    for offset in range(0, len(content), _CHUNK_BYTES):
        yield pb.Chunk(offset=offset, data=content[offset : offset + _CHUNK_BYTES])


class _Answer:
    """One request: its output message, sent again with the next token in each step."""

    def __init__(
        self, submit: pb.Submit, words: Words, num_shared_tokens: int = 0, meter: AnswerMeter | None = None
    ) -> None:
        """`num_shared_tokens`: tokens of the prompt that came apart from `submit`, for all choices together.

        `meter` charges its account, if the worker grants.
        """
        self._words = words
        self.meter = meter
        self._num_prompt_tokens = submit.num_prompt_tokens
        self._max_tokens = submit.sampling.max_tokens
        self._position = num_shared_tokens + len(submit.token_ids)
        self._end = submit.num_prompt_tokens + submit.sampling.max_tokens
        self._output = pb.TokenOutput(
            request_id=submit.request_id, attempt=submit.attempt, choice_index=submit.choice_index, token_ids=[0]
        )

    @property
    def is_over(self) -> bool:
        return self._position >= self._end

    def next(self) -> pb.TokenOutput:
        output = self._output
        output.position = self._position
        output.token_ids[0] = self._words.token_id(self._position)
        self._position += 1
        if self.is_over:
            output.finish_reason = pb.FINISH_REASON_LENGTH
            output.ledger.num_prompt_tokens = self._num_prompt_tokens
            output.ledger.num_computed_tokens = self._num_prompt_tokens
            output.ledger.num_generated_tokens = self._max_tokens
        return output


class GatewayStream:
    """One Attach stream: its requests, and the steps that report them."""

    def __init__(
        self,
        words: Words,
        token_seconds: float,
        first_token_seconds: float = 0.0,
        has_room: Callable[[int], bool] = lambda num_own: True,
        grants: SeatGrants | None = None,
    ) -> None:
        """`has_room`: whether one more request may run, beside so many of this gateway.

        `grants`: None: gateways estimate the room.
        """
        self._grants = grants
        self._words = words
        self._first_token_seconds = first_token_seconds
        self._has_room = has_room
        self.num_generated = 0
        self._num_turns = _NUM_TURNS if token_seconds else 1
        self._pause_seconds = token_seconds / self._num_turns
        self._running: list[dict[tuple[str, int], _Answer]] = [{} for _ in range(self._num_turns)]
        self._replies: list[pb.Event] = []
        self._asked = asyncio.Event()
        self._step = 0
        self._next_step_at = 0.0

    async def read(self, commands: AsyncIterator[pb.Command]) -> None:
        async for command in commands:
            if command.WhichOneof("kind") == "hello":
                self._greet(command.hello)
            elif command.WhichOneof("kind") == "demand" and self._grants is not None:
                self._grants.demanded(self, command.demand)
            elif command.WhichOneof("kind") == "submit":
                self.submit(command.submit)
            elif command.WhichOneof("kind") == "choices":
                num_shared_tokens = len(command.choices.shared.token_ids)
                for choice in command.choices.choices:  # a copy of the prompt for each would stop the other streams
                    self.submit(choice, num_shared_tokens)
            elif command.WhichOneof("kind") == "cancel":
                self._cancel(command.cancel)

    def _greet(self, hello: pb.AttachHello) -> None:
        if self._grants is not None and hello.uses_grants:
            self._grants.attach(self)

    def _cancel(self, cancel: pb.Cancel) -> None:
        for turn in self._running:
            answer = turn.pop((cancel.request_id, cancel.attempt), None)
            if answer is not None and answer.meter is not None:
                answer.meter.ended()
            if answer is not None and self._grants is not None:
                self._grants.ended()

    async def events(self) -> AsyncIterator[pb.Event]:
        """Yield replies and steps, for ever; a step is made once the one before it was taken."""
        while True:
            replies, self._replies = self._replies, []
            for reply in replies:
                yield reply
            now = asyncio.get_running_loop().time()
            if now >= self._next_step_at:  # else it was woken by what was asked
                self._next_step_at = now + self._pause_seconds
                if outputs := self._outputs():
                    yield pb.Event(step=pb.StepBatch(step=self._step, outputs=outputs))
            await self._wait()

    def load(self) -> int:
        """Return how many requests run."""
        return sum(map(len, self._running))

    def submit(self, submit: pb.Submit, num_shared_tokens: int = 0) -> None:
        """Take in a request; `num_shared_tokens` of its prompt came apart from it."""
        if self._grants is not None:
            self._grants.received(self, submit)
        if not self._has_room(self.load()):
            grant = None if self._grants is None else self._grants.refused(self)
            self.refuse(submit, Overloaded(f"{self.load()} requests run, which is all", retry_after_seconds=1.0), grant)
            return
        self.accept(submit)
        if not self._first_token_seconds:
            self.answer(submit, num_shared_tokens)
            return
        seconds = random.lognormvariate(math.log(self._first_token_seconds), FIRST_TOKEN_SIGMA)
        delay = max(MIN_FIRST_TOKEN_SECONDS, seconds)
        asyncio.get_running_loop().call_later(delay, self.answer, submit, num_shared_tokens)

    def accept(self, submit: pb.Submit) -> None:
        self._reply(accepted=pb.Accepted(request_id=submit.request_id, attempt=submit.attempt))

    def refuse(self, submit: pb.Submit, error: TandemError, grant: pb.Grant | None = None) -> None:
        """`grant`: the gateway's new one."""
        refused = pb.Refused(request_id=submit.request_id, attempt=submit.attempt, error=error.to_proto(), grant=grant)
        self._reply(refused=refused)

    def answer(self, submit: pb.Submit, num_shared_tokens: int = 0) -> None:
        """Give an accepted request a token in each step from now on."""
        turn = min(self._running, key=len)
        meter = None if self._grants is None else self._grants.began(self, submit)
        turn[submit.request_id, submit.attempt] = _Answer(submit, self._words, num_shared_tokens, meter)
        self._asked.set()

    def _reply(self, **kind: Any) -> None:
        self.send(pb.Event(**kind))

    def send(self, event: pb.Event) -> None:
        """Send an event before the next step."""
        self._replies.append(event)
        self._asked.set()

    def _outputs(self) -> list[pb.TokenOutput]:
        self._step += 1
        turn = self._running[self._step % self._num_turns]
        outputs = [answer.next() for answer in turn.values()]
        self.num_generated += len(outputs)
        for answer in turn.values():
            if answer.meter is not None:
                answer.meter.answered(1)
        ended = [request for request, answer in turn.items() if answer.is_over]
        for request in ended:
            meter = turn.pop(request).meter
            if meter is not None:
                meter.ended()
        if self._grants is not None and ended:
            self._grants.ended()
        return outputs

    async def _wait(self) -> None:
        """Wait until the next step may be made, or something was asked; let the reader of commands in meanwhile."""
        if self._pause_seconds or not self.load():
            try:
                async with asyncio.timeout_at(self._next_step_at if self.load() else None):
                    await self._asked.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        self._asked.clear()


class StandIn(worker_pb2_grpc.WorkerServiceServicer):
    """tandem.v1.WorkerService, as a gateway needs it."""

    def __init__(
        self,
        token_seconds: float,
        folder: Path,
        model_id: str = MODEL_ID,
        worker_id: str = "stand-in",
        context_length: int = CONTEXT_LENGTH,
        first_token_seconds: float = 0.0,
        max_running: int = 0,
        num_seats: int = 0,
    ) -> None:
        """`max_running` requests of each gateway run, others are refused; 0: any number.

        `num_seats` of all gateways, and an eighth more, which an engine would let wait; 0: any number.
        """
        self._max_running = max_running
        self._num_seats = num_seats
        self._busy_seconds = 0.0
        self._reported_at = time.monotonic()
        self._num_generated = 0
        """Of streams that have ended."""
        self._token_seconds = token_seconds
        self._first_token_seconds = first_token_seconds
        self._folder = folder
        self._words = Words(folder)
        self._gateways: set[GatewayStream] = set()
        self._grants = SeatGrants(self._num_places, lambda: self._num_running) if num_seats else None
        self._state = pb.WORKER_STATE_READY
        self.info = pb.WorkerInfo(
            worker_id=worker_id,
            incarnation=identity.new_incarnation(),
            role=pb.WORKER_ROLE_DECODE,
            settings={"max_num_seqs": str(num_seats)} if num_seats else {},
            host_id=identity.default_host_id(),
            card=model_card(folder, model_id, context_length),
        )

    async def Attach(self, request_iterator: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        gateway = self.new_stream()
        self._gateways.add(gateway)
        reader = asyncio.create_task(gateway.read(request_iterator))
        try:
            hello = pb.AttachHello(worker_incarnation=self.info.incarnation, takes_choices=True, counts_events=True)
            hello.uses_grants = self._grants is not None
            yield pb.Event(hello=hello)
            async for event in gateway.events():
                yield event
        finally:
            reader.cancel()
            self._gateways.discard(gateway)
            if self._grants is not None:
                self._grants.detach(gateway)
            self._num_generated += gateway.num_generated

    def new_stream(self) -> GatewayStream:
        """Return what answers on one Attach stream."""
        return GatewayStream(self._words, self._token_seconds, self._first_token_seconds, self._has_room, self._grants)

    def _has_room(self, num_own: int) -> bool:
        if self._max_running and num_own >= self._max_running:
            return False
        return not self._num_seats or self._num_running < self._num_places

    @property
    def _num_places(self) -> int:
        """Return how many requests may run, or wait, as in an engine."""
        return self._num_seats + self._num_seats // 8

    @property
    def _num_running(self) -> int:
        return sum(gateway.load() for gateway in self._gateways)

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        for chunk in asset_chunks(self._folder, self.info.card, request.digest):
            yield chunk

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply(info=self.info, load=self.load())

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        return TablesReply(incarnation=self.info.incarnation)

    async def Drain(self, request: DrainRequest, context: Any) -> DrainReply:
        self._state = pb.WORKER_STATE_READY if request.resume else pb.WORKER_STATE_DRAINING
        return DrainReply(state=self._state)

    def load(self) -> pb.LoadReport:
        pool = pb.KvPool(num_total_blocks=_NUM_BLOCKS, num_free_blocks=_NUM_BLOCKS, tokens_per_block=BLOCK_SIZE)
        if not self._num_seats:
            return pb.LoadReport(state=self._state, kv=pool, num_running=self._num_running)
        return pb.LoadReport(state=self._state, kv=pool, num_running=self._num_running, counters=self._counters())

    def _counters(self) -> dict[str, float]:
        """Return what an engine would have counted: it has stepped since the last report if anything runs."""
        now = time.monotonic()
        self._busy_seconds += now - self._reported_at if self._num_running else 0.0
        self._reported_at = now
        num_generated = self._num_generated + sum(gateway.num_generated for gateway in self._gateways)
        return {
            "steps": self._busy_seconds / self._token_seconds,
            "step_seconds": self._busy_seconds,
            "tokens_generated": float(num_generated),
        }


async def serve(control: list[str], worker: StandIn, drain: asyncio.Event) -> int:
    """Register and answer until `drain` is set."""

    def register(server: Any) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)

    server = GrpcServer("127.0.0.1:0", register, ["tandem.v1.WorkerService"])
    worker.info.address = await server.start()
    server.set_serving(True)
    registrar = Registrar(control, worker.info, worker.load)
    registrar.start()
    try:
        await drain.wait()
    finally:
        await registrar.stop()
        await server.stop(0)
    return 0


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway.stand_in_worker", description=__doc__.splitlines()[0]
    )
    options.add_argument("control", nargs="+", metavar="CONTROL", help="gRPC addresses of gateways")
    options.add_argument(
        "--token-seconds", type=float, default=0.0, help="how often each request has a token; 0: at once"
    )
    options.add_argument(
        "--first-token-seconds", type=float, default=0.0, help="median of the time to the first token; 0: at once"
    )
    options.add_argument("--model", default=MODEL_ID, help="what clients call the model")
    options.add_argument("--folder", type=Path, default=checkpoint_path(), help="of the model's tokenizer and template")
    options.add_argument("--worker-id", default="stand-in")
    options.add_argument("--context-length", type=int, default=CONTEXT_LENGTH, help="in tokens")
    options.add_argument("--max-running", type=int, default=0, help="requests of each gateway; more are refused")
    options.add_argument("--seats", type=int, default=0, help="requests that run at once, of all gateways together")
    given = options.parse_args()
    if given.seats and not given.token_seconds:
        options.error("--seats needs --token-seconds: without a pace there are no steps")
    log.configure("tandem-stand-in", level="warning")
    worker = StandIn(
        given.token_seconds,
        given.folder,
        given.model,
        given.worker_id,
        given.context_length,
        given.first_token_seconds,
        given.max_running,
        given.seats,
    )
    return lifecycle.run(lambda drain: serve(given.control, worker, drain))


if __name__ == "__main__":
    sys.exit(main())

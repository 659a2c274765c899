"""Drains or kills one of two gateways in turn, under load, and starts it again; then reads the ledger.

    python -m tests.system.gateways_in_turn --minutes 5 --every 20

Each client has a home gateway. It asks the other one while its own refuses, as behind a load balancer, over connections
that stay open. What must hold:

- a stream breaks only at a gateway that was killed, and its client has the error before that gateway is started again
- all that runs at a gateway when it is drained ends by itself, and the gateway with exit code 0
- the ledger has one row for each request, with its outcome and the tokens that its client received
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import sqlalchemy as sa

from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import ledger
from tests.control_plane.postgres import running_postgres
from tests.ports import free_ports
from tests.system.conftest import SMALL
from tests.system.fleet import until
from tests.system.machine import Machine
from tests.system.streams import MODEL

Kind = Literal["completions", "native", "whole"]
End = Literal["complete", "broken", "refused", "unanswered"]
"""broken: after the answer had begun. refused: 503, or no connection. unanswered: no byte of an answer came."""
What = Literal["drain", "kill"]
KINDS: tuple[Kind, ...] = ("completions", "native", "whole")
MIN_TOKENS = 16
_MIDDLE_TOKENS = 64
"""A stream that lacks so many tokens is in the middle: fewer may be in the socket's buffer, and outlive a gateway."""


@dataclass(frozen=True)
class Options:
    turns: Sequence[tuple[int, What]]
    """Which gateway, and what is done to it."""
    period_seconds: float = 0.0
    """Between the beginnings of two turns; a turn that takes longer is followed at once."""
    starts_last_again: bool = True
    """Whether the gateway of the last turn is started again, too."""
    clients_per_gateway: int = 3
    think_seconds: float = 0.0
    """The pause of a client between two answers."""
    has_prefill: bool = False
    max_tokens: int = 256
    """Of the longest answer; a turn waits for one that is longer than 64."""
    gone_seconds: float = 3.0
    seed: int = 0
    database_url: str = ""


@dataclass(eq=False)
class Call:
    """One request, as its client saw it."""

    kind: Kind
    gateway: int
    life: int
    """How often the gateway had been started before."""
    request_id: str = ""
    num_asked: int = 0
    """Tokens that the answer will have."""
    num_tokens: int = 0
    """Received; of a native stream that broke, unknown."""
    end: End | None = None
    ended_at: float = 0.0
    problem: str = ""

    @property
    def is_in_the_middle(self) -> bool:
        """Whether the answer has begun and most likely breaks if its gateway is killed now."""
        # One event of a native stream may have several tokens, so what it lacks is not known.
        return self.kind == "completions" and 0 < self.num_tokens <= self.num_asked - _MIDDLE_TOKENS


@dataclass
class Turn:
    what: What
    gateway: int
    num_running: int
    """Calls at the gateway, answered or not."""
    num_broken: int = 0
    last_end_seconds: float = 0.0
    """After the signal, until the last of them had its end or its error."""
    exit_code: int = 0
    start_seconds: float = 0.0
    """Until the gateway was ready again."""


@dataclass
class Verdict:
    turns: list[Turn] = field(default_factory=list)
    num_calls: Counter[str] = field(default_factory=Counter)
    """By end."""
    num_tokens: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    """By status and error."""
    num_lost_closings: int = 0
    """Complete answers whose gateway was killed before it had written their end: aborted and not billed."""
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        kills = [turn for turn in self.turns if turn.what == "kill"]
        drains = [turn for turn in self.turns if turn.what == "drain"]
        num_killed = sum(turn.num_running for turn in kills)
        return [
            f"calls {dict(self.num_calls)}, {self.num_tokens} tokens; rows {dict(self.rows)}",
            f"{len(kills)} kills: {sum(turn.num_broken for turn in kills)} of {num_killed} calls "
            f"broken, the last error after {max((turn.last_end_seconds for turn in kills), default=0.0):.3f} s",
            f"{len(drains)} drains: {sum(turn.num_broken for turn in drains)} of "
            f"{sum(turn.num_running for turn in drains)} calls broken, the longest drain "
            f"{max((turn.last_end_seconds for turn in drains), default=0.0):.2f} s",
            f"complete answers without a closing: {self.num_lost_closings}",
            *(f"PROBLEM: {problem}" for problem in self.problems),
        ]


class Run:
    def __init__(self, options: Options, folder: Path) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        secret = {"TANDEM_SECRET": secrets.token_hex(32), "TANDEM_CONTROL_DATABASE_URL": options.database_url}
        self._machine = Machine(folder, **secret)
        self._http_ports, self._grpc_ports = free_ports(2), free_ports(2)
        self._lives = [0, 0]
        self._calls: list[Call] = []
        self._running: set[Call] = set()
        self._changed = asyncio.Event()
        self._killed: set[tuple[int, int]] = set()
        self._stopping = False
        self.verdict = Verdict()

    async def run(self) -> Verdict:
        options = self._options
        try:
            await self._start()
            async with asyncio.TaskGroup() as group:
                for client in range(2 * options.clients_per_gateway):
                    group.create_task(self._client(client % 2, KINDS[client // 2 % len(KINDS)]))
                began = time.monotonic()
                for number, (index, what) in enumerate(options.turns):
                    await asyncio.sleep(max(0.0, began + number * options.period_seconds - time.monotonic()))
                    await self._turn(index, what)
                    if number < len(options.turns) - 1 or options.starts_last_again:
                        await self._start_again(index)
                self._stopping = True
            await self._check_ledger()
        finally:
            await self._machine.stop(*(name for name in self._machine.running if name.startswith("gateway")))
            await self._machine.stop()
        return self.verdict

    # -------------------------------------------------------------------------------------------------- processes

    async def _start(self) -> None:
        control = ("--control", ",".join(f"127.0.0.1:{port}" for port in self._grpc_ports), "--insecure-plaintext")
        for index in range(2):
            self._start_gateway(index)
        self._machine.start("decode_svc", *control, "--worker-id", "decode-0", "--listen", "127.0.0.1:0", *SMALL)
        if self._options.has_prefill:
            self._machine.start("kv_transfer_svc", *control, "--worker-id", "kv-0", "--listen", "127.0.0.1:0")
            self._machine.start("prefill_svc", *control, "--worker-id", "prefill-0", "--listen", "127.0.0.1:0", *SMALL)
        await asyncio.gather(self._ready(0), self._ready(1))

    def _start_gateway(self, index: int) -> None:
        self._machine.start(
            "control_plane",
            *("--listen", f"127.0.0.1:{self._http_ports[index]}"),
            *("--grpc-listen", f"127.0.0.1:{self._grpc_ports[index]}", "--insecure-plaintext"),
            *("--replicas", ",".join(f"127.0.0.1:{port}" for port in self._grpc_ports)),
            *("--gateway-gone-seconds", f"{self._options.gone_seconds:g}"),
            name=f"gateway-{index}",
        )

    async def _ready(self, index: int) -> None:
        async with self._http(index) as http:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get("/readyz")).status_code == 200
                return False

            await until(is_ready, 120, self._machine.end_of_log)

    def _http(self, index: int) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self._http_ports[index]}"
        return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(60, connect=5), trust_env=False)

    # ------------------------------------------------------------------------------------------------------ turns

    async def _turn(self, index: int, what: What) -> None:
        """Drain or kill a gateway with running streams, and see what becomes of them."""
        await self._until(lambda: any(call.is_in_the_middle for call in self._at(index)))
        process, life = self._machine.running.pop(f"gateway-{index}"), self._lives[index]
        victims = self._at(index)
        turn = Turn(what, index, len(victims))
        self.verdict.turns.append(turn)
        if what == "kill":
            self._killed.add((index, life))
        began = time.monotonic()
        process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
        turn.exit_code = await asyncio.to_thread(process.wait, 120)
        await self._until(lambda: not any(call.life == life for call in self._at(index)))
        # A drain closes connections without a request: what is sent on them meanwhile is not answered, and not lost.
        ends = ("broken", "unanswered") if what == "kill" else ("broken",)
        turn.num_broken = sum(1 for call in victims if call.end in ends)
        turn.last_end_seconds = max((call.ended_at - began for call in victims), default=0.0)
        if turn.exit_code != (0 if what == "drain" else -signal.SIGKILL):
            self._problem(f"gateway-{index} was to {what} and ended with {turn.exit_code}")
        if what == "drain":
            for call in victims:
                if call.end == "broken" or (call.request_id and call.end != "complete"):
                    self._problem(f"{call.kind} at a gateway that drained was {call.end}: {call.problem}")

    async def _start_again(self, index: int) -> None:
        began = time.monotonic()
        self._lives[index] += 1
        self._start_gateway(index)
        await self._ready(index)
        self.verdict.turns[-1].start_seconds = time.monotonic() - began

    def _at(self, index: int) -> list[Call]:
        return [call for call in self._running if call.gateway == index]

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _problem(self, what: str) -> None:
        self.verdict.problems.append(what)

    # ---------------------------------------------------------------------------------------------------- clients

    async def _client(self, home: int, kind: Kind) -> None:
        """Ask one request after the other: the home gateway, or the other one if that refuses."""
        async with self._http(home) as first, self._http(1 - home) as other:
            while not self._stopping:
                call = await self._ask(first, home, kind)
                if call.end in ("refused", "unanswered"):
                    call = await self._ask(other, 1 - home, kind)
                if call.end in ("refused", "unanswered"):
                    await asyncio.sleep(0.1)  # one starts and the other was just stopped
                await asyncio.sleep(self._options.think_seconds)

    async def _ask(self, http: httpx.AsyncClient, index: int, kind: Kind) -> Call:
        call = Call(kind, index, self._lives[index])
        self._calls.append(call)
        self._running.add(call)
        try:
            await self._read(http, call)
        except httpx.ConnectError as error:
            call.end, call.problem = "refused", repr(error)
        except httpx.TransportError as error:
            call.end = "broken" if call.request_id else "unanswered"
            call.problem = call.problem or repr(error)
        finally:
            call.ended_at = time.monotonic()
            self._running.discard(call)
            self._changed.set()
        if call.end == "broken" and (call.gateway, call.life) not in self._killed:
            self._problem(f"{kind} of gateway-{index}, which nobody killed, broke: {call.problem}")
        return call

    async def _read(self, http: httpx.AsyncClient, call: Call) -> None:
        call.num_asked = self._random.randint(MIN_TOKENS, self._options.max_tokens)
        body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": call.num_asked, "ignore_eos": True}
        body["seed"], body["temperature"] = self._random.randrange(1 << 31), 1.0
        path = f"/client/v4/accounts/default/ai/run/{MODEL}" if call.kind == "native" else "/v1/completions"
        if call.kind != "native":
            body |= {"model": MODEL, "logprobs": 0}
        if call.kind != "whole":
            body["stream"] = True
        async with http.stream("POST", path, json=body) as response:
            request_id = response.headers["x-request-id"]
            if response.status_code == 503:
                call.request_id, call.end, call.problem = request_id, "refused", (await response.aread()).decode()
                return
            assert response.status_code == 200, (await response.aread()).decode()
            call.request_id = request_id
            if call.kind == "whole":
                call.num_tokens = json.loads(await response.aread())["usage"]["completion_tokens"]
                call.end = "complete"
                return
            async for line in response.aiter_lines():
                self._take_event(call, line)
        if call.end is None:
            call.end, call.problem = "broken", "the stream ended without [DONE]"

    def _take_event(self, call: Call, line: str) -> None:
        if line == "data: [DONE]":
            call.end = "complete"
            return
        if not line.startswith("data: "):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            call.end, call.problem = "broken", line
        elif call.kind == "completions":
            call.num_tokens += sum(len((each.get("logprobs") or {}).get("tokens", ())) for each in event["choices"])
        else:
            usage = event.get("usage")
            call.num_tokens = usage["completion_tokens"] if usage else call.num_tokens + 1
        self._changed.set()

    # ----------------------------------------------------------------------------------------------------- ledger

    async def _check_ledger(self) -> None:
        database = Database(database_url(self._options.database_url, self._machine.state_dir))
        try:

            async def all_closed() -> bool:
                async with database.each() as connection:
                    open_rows = sa.select(sa.func.count()).select_from(ledger).where(ledger.c.closed_ms.is_(None))
                    return not await connection.scalar(open_rows)

            await until(all_closed, 10 * self._options.gone_seconds + 30, self._machine.end_of_log)
            async with database.each() as connection:
                rows = list(await connection.execute(sa.select(ledger)))
        finally:
            await database.close()
        self._compare({row.request_id: row for row in rows})

    def _compare(self, rows: dict[str, Any]) -> None:
        verdict = self.verdict
        verdict.num_calls = Counter(call.end or "none" for call in self._calls)
        verdict.num_tokens = sum(call.num_tokens for call in self._calls)
        verdict.rows = Counter(f"{row.status} {row.error}".strip() for row in rows.values())
        num_unanswered = sum(
            1 for call in self._calls if call.end == "unanswered" and (call.gateway, call.life) in self._killed
        )
        for call in self._calls:
            if call.request_id:
                row = rows.pop(call.request_id, None)
                if (why := self._wrong(call, row)) is not None:
                    self._problem(f"ledger: {why}; {asdict(call)}; {row}")
        strangers = [row for row in rows.values() if not _is_lost(row)]
        if strangers or len(rows) > num_unanswered:
            self._problem(f"ledger: {len(rows)} rows without a call ({num_unanswered} unanswered): {strangers}")

    def _wrong(self, call: Call, row: Any) -> str | None:
        """Return what is wrong with the row of a call."""
        if call.end == "refused":
            is_right = row is None or (row.status in ("failed", "aborted") and row.num_completion_tokens == 0)
            return None if is_right else "a refused request was billed"
        if row is None:
            return "no row"
        was_killed = (call.gateway, call.life) in self._killed
        if call.end == "broken":
            return None if was_killed and _is_lost(row) else "a killed gateway's row is not aborted and free"
        if was_killed and _is_lost(row):
            self.verdict.num_lost_closings += 1
            return None
        is_right = (row.status, row.error, row.num_completion_tokens) == ("finished", "", call.num_tokens)
        return None if is_right else "not finished with the tokens that its client received"


def all_turns(count: int) -> list[tuple[int, What]]:
    """Return turns in which each gateway is drained, then each is killed, and so on."""
    return [(number % 2, "drain" if number // 2 % 2 == 0 else "kill") for number in range(count)]


def _is_lost(row: Any) -> bool:
    return (row.status, row.error) == ("aborted", "GatewayLost") and row.num_completion_tokens == row.microneurons == 0


@contextlib.asynccontextmanager
async def _database(wants_postgres: bool) -> AsyncIterator[str]:
    if not wants_postgres:
        yield ""
        return
    with running_postgres() as server:
        yield server.new_database()


async def _main(asked: argparse.Namespace) -> Verdict:
    async with _database(asked.postgres) as url:
        options = Options(
            turns=all_turns(math.ceil(asked.minutes * 60 / asked.every)),
            period_seconds=asked.every,
            clients_per_gateway=asked.clients,
            has_prefill=True,
            max_tokens=asked.max_tokens,
            gone_seconds=6.0,
            seed=asked.seed,
            database_url=url,
        )
        return await Run(options, Path(tempfile.mkdtemp(prefix="tandem-gateways-")) / "machine").run()


def main() -> int:
    parser = argparse.ArgumentParser(description="Drain or kill one of two gateways in turn, and check the ledger.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between the beginnings of two turns")
    parser.add_argument("--clients", type=int, default=6, help="of each gateway")
    parser.add_argument("--max-tokens", type=int, default=1200, help="of the longest answer")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL of its own instead of SQLite")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    verdict = asyncio.run(_main(asked))
    print("\n".join([*(str(turn) for turn in verdict.turns), *verdict.lines()]), flush=True)
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())

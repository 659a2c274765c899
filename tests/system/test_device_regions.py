"""Hands prompts over through device memory, between real processes with a stand-in for NVIDIA's driver."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tandem.v1 import tables_pb2 as tables
from tandem.v1 import types_pb2 as pb
from tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from tandem_runtime.channel import open_worker_channel
from tests.cuda_driver import stub_folder
from tests.device_memory import device_memory_of_all
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, tokens_of, until
from tests.system.streams import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEVICE = (*SMALL, "--kv-region", "device")
NUM_TOKENS = 12
PROMPT = list(range(20, 120))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Workers of one host: two with pools in device memory, and one that has no driver."""
    driver = {"LD_LIBRARY_PATH": str(stub_folder())}
    async with Fleet(tmp_path_factory.mktemp("device")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-device", *DEVICE, env=driver)
        fleet.start("decode", "decode-device", *DEVICE, env=driver)
        fleet.start("decode", "decode-without-driver", *SMALL)
        await fleet.ready()
        await fleet.proven()  # no probe runs while the tests count
        yield fleet


async def answer(fleet: Fleet, decode: str, prefill: str | None, first: int) -> list[int]:
    """Return the greedy tokens of a prompt that begins with token `first` and is in no cache."""
    request = token_request(MODEL, [first, *PROMPT], NUM_TOKENS, cacheable=False)
    (tokens,) = await tokens_of(fleet.dispatcher(decode, prefill), request)
    return tokens


async def num_imported(fleet: Fleet, decode: str) -> float:
    return (await fleet.stats(decode)).counters["blocks_imported"]


async def lent_regions(fleet: Fleet) -> list[tables.RegionRow]:
    worker = fleet.worker("kv-0")
    assert worker is not None
    async with open_worker_channel(worker.info, fleet.gateway.member) as channel:
        reply = await KvTransferServiceStub(channel).Tables(tables.TablesRequest(max_rows=100), timeout=10)
    return list(reply.regions)


async def test_a_prompt_is_handed_over_from_device_memory(fleet: Fleet) -> None:
    decode = "decode-device"
    before = await num_imported(fleet, decode)
    handed_over = await answer(fleet, decode, "prefill-device", 7)
    assert await num_imported(fleet, decode) - before == -(-(len(PROMPT) + 1) // 16)
    assert handed_over == await answer(fleet, decode, None, 7)
    await fleet.pools_are_full()


async def test_a_worker_without_a_driver_computes_the_prompt_and_says_why(fleet: Fleet) -> None:
    decode = "decode-without-driver"
    before = (await fleet.stats(decode)).counters["kv_pull_failures"]
    assert await answer(fleet, decode, "prefill-device", 8) == await answer(fleet, decode, None, 8)
    assert (await fleet.stats(decode)).counters["kv_pull_failures"] == before + 1
    assert await num_imported(fleet, decode) == 0
    log = fleet.services[decode].log.read_text()
    assert "is in MEMORY_KIND_DEVICE, which this worker cannot map: no CUDA driver" in log
    await fleet.pools_are_full()


async def test_the_table_names_the_kind_of_each_region(fleet: Fleet) -> None:
    kinds = sorted(pb.MemoryKind.Name(row.kind) for row in await lent_regions(fleet))
    assert kinds == [*["MEMORY_KIND_DEVICE"] * 2, "MEMORY_KIND_HOST"]


async def test_a_worker_killed_in_the_middle_costs_no_answer_and_its_device_memory_is_given_back(fleet: Fleet) -> None:
    decode = "decode-device"
    num_regions, num_pulls = len(await lent_regions(fleet)), (await fleet.stats(decode)).counters["kv_pulls"]
    victim = fleet.services["prefill-device"]
    others = [service.process.pid for service in fleet.services.values() if service is not victim]
    memory = device_memory_of_all([victim.process.pid])
    asked = [asyncio.create_task(answer(fleet, decode, "prefill-device", first)) for first in range(9, 15)]

    async def is_pulling() -> bool:
        return (await fleet.stats(decode)).counters["kv_pulls"] > num_pulls

    await until(is_pulling, 30)
    victim.kill(signal.SIGKILL)
    await fleet.ended(fleet.services.pop("prefill-device"))
    answers = await asyncio.gather(*asked)
    assert answers == [await answer(fleet, decode, None, first) for first in range(9, 15)]
    assert memory & device_memory_of_all(others), "the reader holds the dead worker's pool"

    async def is_given_back() -> bool:
        return not memory & device_memory_of_all(others) and len(await lent_regions(fleet)) == num_regions - 1

    await until(is_given_back, 30)
    await fleet.pools_are_full()

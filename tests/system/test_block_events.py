"""Gateways know what real workers and the store of their host have, without having sent the requests."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.fleet.registration import ControlPlaneService
from control_plane.fleet.registry import Worker
from control_plane.routing.prefix_index import PrefixMatch
from tandem.v1 import control_plane_pb2 as cp
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request, until
from tests.system.reference import clear_prompt


async def test_a_restarted_gateway_knows_at_once_what_its_predecessor_left_in_pools_and_stores(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    async with Fleet(tmp_path, certificates=True) as fleet:
        fleet.start("kv", "kv-0")
        for role in ("prefill", "decode"):
            fleet.start(role, f"{role}-0", "--model", str(checkpoint("llama")), *SMALL)
        await fleet.ready()
        prompt = clear_prompt(checkpoint("llama"), 150, 8)
        stream = await fleet.gateway.dispatcher.submit(token_request("tiny-llama", prompt, 8))
        tokens = [token async for delta in stream for token in delta.token_ids]
        decode, prefill = fleet.worker("decode-0"), fleet.worker("prefill-0")
        assert decode is not None and prefill is not None
        hashes, space = stream.state.hashes, decode.space
        assert hashes is not None and len(hashes.blocks) == 9
        # 1. A new gateway has sent nothing: it finds the prompt's end in the pools, its last sample point in the store.
        await fleet.restart_gateway()
        await fleet.ready()

        def found() -> PrefixMatch:
            return fleet.gateway.dispatcher.router.prefixes.find(hashes.blocks, space)

        whole = PrefixMatch({prefill.incarnation: 9, decode.incarnation: 9}, {decode.info.host_id: 8})
        await until(lambda: found() == whole, 20)
        # 2. It routes and predicts by that.
        again = await fleet.gateway.dispatcher.submit(token_request("tiny-llama", prompt, 8))
        assert again.route["cached_own_tokens"] == 144
        assert [token async for delta in again for token in delta.token_ids] == tokens


async def test_heartbeats_come_through_the_host_and_directly_while_its_kv_service_stands_still_or_is_dead(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: Counter[str] = Counter()
    heard = ControlPlaneService._heard

    def counted(self: ControlPlaneService, request: cp.HeartbeatRequest) -> cp.HeartbeatReply:
        direct[request.worker_id] += 1
        return heard(self, request)

    monkeypatch.setattr(ControlPlaneService, "_heard", counted)
    names = ("prefill-0", "decode-0")
    async with Fleet(tmp_path, certificates=True) as fleet:
        fleet.start("kv", "kv-0")
        for name in names:
            fleet.start(name.partition("-")[0], name, "--model", str(checkpoint("llama")), *SMALL)
        await fleet.ready()
        registry, suspected = fleet.registry, set[str]()

        def worker(name: str) -> Worker:
            found = fleet.worker(name)
            assert found is not None, f"{name} is forgotten"
            if found.is_suspected:
                suspected.add(name)
            return found

        def num_direct() -> list[int]:
            return [direct[worker(name).worker_id] for name in names]

        async def are_heard_for(seconds: float, *, through_host: bool) -> list[int]:
            """Wait until each worker was heard for so long, in one way; return the numbers of direct heartbeats."""

            def are_heard() -> bool:
                return all(registry.is_relayed(worker(name)) == through_host for name in names)

            await until(are_heard, 30)
            before, began = num_direct(), {name: worker(name).last_heartbeat for name in names}
            await until(lambda: all(worker(name).last_heartbeat > began[name] + seconds for name in names), 30)
            assert are_heard()
            return [after - num for after, num in zip(num_direct(), before, strict=True)]

        # 1. Through the host; directly once in thirty seconds.
        assert max(await are_heard_for(2.2, through_host=True)) <= 1
        # 2. The KV service stands still: gateways ask. The four seconds begin with the last heartbeat through the host,
        #    which is two seconds old by then.
        fleet.services["kv-0"].kill(signal.SIGSTOP)
        assert min(await are_heard_for(4.0, through_host=False)) >= 2
        fleet.services["kv-0"].kill(signal.SIGCONT)
        await are_heard_for(0.0, through_host=True)
        # 3. The KV service dies.
        fleet.services["kv-0"].kill()
        assert min(await are_heard_for(4.0, through_host=False)) >= 2
        assert not suspected

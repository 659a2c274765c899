"""Gateways know what real workers and the store of their host have, without having sent the requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from control_plane.routing.prefix_index import PrefixMatch
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
        # 1. A new gateway has sent nothing, and finds the longest sample point of the prompt everywhere.
        await fleet.restart_gateway()
        await fleet.ready()

        def found() -> PrefixMatch:
            return fleet.gateway.dispatcher.router.prefixes.find(hashes.blocks, space)

        whole = PrefixMatch({prefill.incarnation: 8, decode.incarnation: 8}, {decode.info.host_id: 8})
        await until(lambda: found() == whole, 20)
        # 2. It routes and predicts by that.
        again = await fleet.gateway.dispatcher.submit(token_request("tiny-llama", prompt, 8))
        assert again.route["cached_own_tokens"] == 128
        assert [token async for delta in again for token in delta.token_ids] == tokens

"""Two random adapters in the real engine process, beside `vllm.LLM` alone with a LoRARequest."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tandem_engine.client import EngineClient
from tandem_engine.messages import AddRequest, EngineFailed, Ready, Refused, StepDone
from tandem_engine.models.checkpoint import find_checkpoint
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import hash_root
from tandem_engine.settings import EngineConfig
from tandem_worker.vllm_program import vllm_program
from tests.tandem_vllm.adapter_files import make_adapter
from tests.tandem_vllm.test_vllm_process import next_of

PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
PROMPT = list(range(20, 90))

pytestmark = pytest.mark.skipif(not PYTHON, reason="TANDEM_VLLM_PYTHON names no interpreter with vLLM")

ALONE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
folder, prompt, *adapters = sys.argv[1:]
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=1001, skip_tokenizer_init=True, enable_lora=True,
          max_loras=2, max_lora_rank=8, num_gpu_blocks_override=33, kv_cache_memory_bytes=1 << 28)
asked = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
found = []
for index, adapter in enumerate(["", *adapters]):
    lora = LoRARequest(str(index), index, adapter) if adapter else None
    (output,) = llm.generate([{"prompt_token_ids": json.loads(prompt)}], asked, lora_request=lora, use_tqdm=False)
    found.append(list(output.outputs[0].token_ids))
print("FOUND", json.dumps(found), flush=True)
import os; os._exit(0)
"""


async def alone(*adapters: Path) -> list[list[int]]:
    folder = find_checkpoint("@tandem/demo", "", lambda stage, fraction: None, "").folder
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, "-c", ALONE, str(folder), json.dumps(PROMPT), *map(str, adapters)),
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    (line,) = [line for line in output.decode().splitlines() if line.startswith("FOUND ")]
    found: list[list[int]] = json.loads(line.removeprefix("FOUND "))
    return found


async def answer(client: EngineClient, events: Any, name: str, adapter: str, root: bytes) -> tuple[list[int], int]:
    """Return tokens and the number of prompt tokens that came from the prefix cache."""
    sampling = SamplingParams(max_tokens=16, temperature=0.0)
    client.send(AddRequest(name, PROMPT, len(PROMPT), sampling, hash_root=root.hex(), adapter=adapter))
    tokens: list[int] = []
    while True:
        for output in (await next_of(events, StepDone)).outputs:
            tokens += output.token_ids
            if output.is_last:
                return tokens, output.num_cached_tokens


async def test_each_adapter_answers_as_vllm_alone_and_shares_no_block(tmp_path: Path) -> None:
    red, blue = make_adapter(tmp_path / "red", 1), make_adapter(tmp_path / "blue", 2)
    of_base, of_red, of_blue = await alone(red, blue)
    assert of_base != of_red != of_blue != of_base
    config = EngineConfig(
        "@tandem/demo",
        num_threads=1,
        num_kv_blocks=64,
        max_model_len=1000,
        adapters=(f"red={red}", f"blue={blue}"),
    )
    client = await EngineClient.start(config, vllm_program(PYTHON, tmp_path))
    events = client.events()
    try:
        ready = await next_of(events, Ready, EngineFailed)
        assert isinstance(ready, Ready), ready
        assert [each.name for each in ready.model.adapters] == ["blue", "red"]
        digests = {each.name: each.digest for each in ready.model.adapters} | {"": ""}
        roots = {name: hash_root(b"model", 16, digest, b"account") for name, digest in digests.items()}
        # 1. the same prompt for each: nothing that another has left is found
        for name, expected in {"": of_base, "red": of_red, "blue": of_blue}.items():
            assert await answer(client, events, f"first {name}", name, roots[name]) == (expected, 0)
        # 2. each finds its own two full blocks of 32 tokens
        for name, expected in {"": of_base, "red": of_red, "blue": of_blue}.items():
            assert await answer(client, events, f"again {name}", name, roots[name]) == (expected, 64)
        # 3. an unknown name is refused with the known ones
        client.send(AddRequest("other", PROMPT, len(PROMPT), SamplingParams(max_tokens=1), adapter="green"))
        refused = await next_of(events, Refused)
        assert refused.reason == "unsupported" and "blue, red" in refused.message
    finally:
        await client.stop()

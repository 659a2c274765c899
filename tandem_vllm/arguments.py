"""Makes vLLM's arguments of a worker's settings and of the operator's flags for vLLM, and refuses some flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args

from vllm.config import KVTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tandem_engine.adapters import AdapterFiles
from tandem_engine.errors import ModelUnusable
from tandem_engine.settings import EngineConfig
from tandem_machine.memory import usable_memory
from tandem_vllm.hosts import Network, Place

CPU_BLOCK_SIZE = 32
"""vLLM's attention on CPUs takes blocks of a multiple of this."""
_CPU_SHARE = 0.2
"""Of free memory, for a pool without a size, as in our own engine."""

_OWNED: Mapping[str, str] = {
    "model": "--model",
    "served_model_name": "--served-model-name",
    "revision": "--model",
    "tokenizer": "--model",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "num_gpu_blocks_override": "--num-kv-blocks",
    "kv_cache_memory_bytes": "--kv-memory-bytes",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "max_num_queued_reqs": "--max-num-waiting",
    "enable_lora": "--adapters",
    "max_loras": "--adapters",
    "max_cpu_loras": "--adapters",
    "max_lora_rank": "--adapters",
}
"""vLLM's name -> the worker's own flag."""

_DRAW = "the tokens are drawn by Tandem, as a function of seed, position and answer"
_OTHER_RANKS = "this version of tandem_vllm has tensor and pipeline parallelism, and no other"
_OWN_WORKER = "Tandem's draw is reached through vLLM's own worker"
_SCHEDULER = "answers would be counted and stopped in another way"
_KEYS = "the KV cache of each account has its own keys, and these flags change keys or readers"
_BROKEN: Mapping[str, str] = {
    "async_scheduling": f"{_DRAW}, and a step would be planned before the last token is known",
    "speculative_config": f"{_DRAW}, and vLLM's speculation draws by a ratio",
    "spec_method": f"{_DRAW}, and vLLM's speculation draws by a ratio",
    "spec_model": f"{_DRAW}, and vLLM's speculation draws by a ratio",
    "spec_tokens": f"{_DRAW}, and vLLM's speculation draws by a ratio",
    "diffusion_config": _DRAW,
    "watermark_config": _DRAW,
    "logits_processors": _DRAW,
    "logprobs_mode": _DRAW,
    "generation_config": _DRAW,
    "override_generation_config": _DRAW,
    "additional_config": _DRAW,
    "runner": "this engine generates text; encoders have workers of their own",
    "pooler_config": "this engine generates text; encoders have workers of their own",
    "scheduler_cls": _SCHEDULER,
    "scheduling_policy": _SCHEDULER,
    "stream_interval": _SCHEDULER,
    "worker_cls": _OWN_WORKER,
    "worker_extension_cls": _OWN_WORKER,
    "distributed_executor_backend": "Tandem takes uni for one rank, and mp for several",
    "data_parallel_size": _OTHER_RANKS,
    "prefill_context_parallel_size": _OTHER_RANKS,
    "decode_context_parallel_size": _OTHER_RANKS,
    "node_rank": "the hosts of an engine are numbered in the order in which they call",
    "kv_transfer_config": f"{_KEYS}; Tandem moves the blocks",
    "kv_events_config": f"{_KEYS}; Tandem moves the blocks",
    "ec_transfer_config": f"{_KEYS}; Tandem moves the blocks",
    "kv_offloading_size": f"{_KEYS}; Tandem's KV service stores blocks",
    "kv_offloading_backend": f"{_KEYS}; Tandem's KV service stores blocks",
    "prefix_caching_hash_algo": f"{_KEYS}; a weaker hash would let accounts collide",
    "allowed_local_media_path": "media are read by gateways",
    "hf_token": "a flag is seen by all who read this worker's settings; set the variable HF_TOKEN",
    "otlp_traces_endpoint": "set --otlp-endpoint of the worker; vLLM's own traces are not Tandem's",
}
"""vLLM's name -> the promise that another value breaks."""


_RANKS: tuple[Any, ...] = get_args(MaxLoRARanks)
"""The ranks that vLLM has buffers for."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ModelUnusable(f"--engine-args: vLLM refuses them: {message}")


def engine_args(
    config: EngineConfig,
    folder: str,
    is_cpu: bool,
    facts: Mapping[str, Any],
    adapters: Sequence[AdapterFiles] = (),
    place: Place | None = None,
) -> EngineArgs:
    """Return vLLM's arguments; raises ModelUnusable, which names the flag and why it is refused.

    `folder` has the checkpoint, `facts` is for `tandem_vllm.sampling`. `place`: of this host, if there are several.
    """
    args = EngineArgs.from_cli_args(_parsed(config.engine_args))
    args.model = folder
    args.served_model_name = config.served_model_name or None
    args.dtype = _dtype(config, is_cpu)
    args.skip_tokenizer_init = True
    args.generation_config = "vllm"  # the defaults of a checkpoint are the gateway's business
    args.seed = 0
    args.async_scheduling = False
    args.scheduling_policy = "priority"
    args.disable_log_stats = True
    args.use_tqdm_on_load = False
    args.enforce_eager = args.enforce_eager or is_cpu  # a CPU gains nothing from graphs, and compiling takes minutes
    args.max_num_seqs = config.max_num_seqs
    args.max_num_batched_tokens = config.max_num_batched_tokens
    args.block_size = block_size(config, is_cpu)
    args.logits_processors = ["tandem_vllm.sampling:TandemDraw"]
    args.additional_config = dict(facts)
    _set_ranks(args, place)
    _set_pool(args, config, is_cpu)
    _set_length(args, config)
    _set_adapters(args, adapters)
    return args


def network_of(config: EngineConfig) -> Network:
    """Return what the operator's flags say of the engine's hosts; raises ModelUnusable."""
    parsed = _parsed(config.engine_args)
    num_ranks = parsed.tensor_parallel_size * parsed.pipeline_parallel_size
    if num_ranks % parsed.nnodes:
        raise ModelUnusable(
            f"--engine-args: --nnodes {parsed.nnodes} is refused: it does not divide the {num_ranks} ranks of "
            "--tensor-parallel-size times --pipeline-parallel-size"
        )
    return Network(parsed.nnodes, parsed.master_addr, parsed.master_port)


def block_size(config: EngineConfig, is_cpu: bool) -> int:
    """Return the tokens per block: the setting, on a CPU the next multiple of what its attention takes."""
    if not is_cpu:
        return config.block_size
    return -(-config.block_size // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE


def _parsed(flags: Sequence[str]) -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(_Parser(prog="--engine-args", add_help=False))
    parsed: argparse.Namespace = parser.parse_args(list(flags))
    for name, promise in _BROKEN.items():
        if getattr(parsed, name, None) != parser.get_default(name):
            raise ModelUnusable(f"--engine-args: {_flag(name)} is refused: {promise}")
    for name, ours in _OWNED.items():
        if getattr(parsed, name, None) != parser.get_default(name):
            raise ModelUnusable(f"--engine-args: {_flag(name)} is refused: set {ours} of the worker")
    return parsed


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _dtype(config: EngineConfig, is_cpu: bool) -> Any:
    return "float32" if config.dtype == "auto" and is_cpu else config.dtype


def _set_ranks(args: EngineArgs, place: Place | None) -> None:
    """Let one rank exchange blocks. Several answer alone: their pools are in other processes.

    With the connector vLLM keeps all layers in one group of blocks; without it that must be asked for.
    """
    has_prefix_cache = args.enable_prefix_caching is not False
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        args.distributed_executor_backend = "mp"
        args.worker_extension_cls = "tandem_vllm.ranks.RankCalls"
        if has_prefix_cache:
            args.disable_hybrid_kv_cache_manager = True
    elif has_prefix_cache:
        args.kv_transfer_config = KVTransferConfig(
            kv_connector="TandemConnector", kv_connector_module_path="tandem_vllm.connector", kv_role="kv_both"
        )
    if place is not None:
        args.nnodes, args.node_rank, args.master_addr, args.master_port = place


def _set_pool(args: EngineArgs, config: EngineConfig, is_cpu: bool) -> None:
    if config.num_kv_blocks is not None:  # as many tokens, in vLLM's blocks, and its block 0, which nobody gets
        args.num_gpu_blocks_override = 1 + -(-config.num_kv_blocks * config.block_size // args.block_size)
    args.kv_cache_memory_bytes = config.kv_memory_bytes
    if is_cpu and config.kv_memory_bytes is None:
        limits = [int(_CPU_SHARE * usable_memory().available_bytes), config.kv_memory_limit_bytes]
        args.kv_cache_memory_bytes = min(limit for limit in limits if limit is not None)


def _set_adapters(args: EngineArgs, adapters: Sequence[AdapterFiles]) -> None:
    """Let vLLM keep all adapters at once; their ranks decide the size of its buffers."""
    if not adapters:
        return
    longest = max(adapter.rank for adapter in adapters)
    rank = min((each for each in _RANKS if each >= longest), default=None)
    if rank is None:
        raise ModelUnusable(f"--adapters: an adapter has rank {longest}, vLLM takes up to {max(_RANKS)}")
    args.enable_lora, args.max_loras, args.max_cpu_loras, args.max_lora_rank = True, len(adapters), len(adapters), rank


def _set_length(args: EngineArgs, config: EngineConfig) -> None:
    """Let vLLM take one token more than our context: the last token of an answer, which needs no KV.

    vLLM ends a request whose tokens reach `max_model_len`, and Tandem one whose tokens exceed the context.
    """
    args.max_model_len = None
    if config.max_model_len is not None:
        longest = args.create_model_config().max_model_len
        args.max_model_len = config.max_model_len if config.max_model_len > longest else config.max_model_len + 1
        args.max_model_len = min(args.max_model_len, max(longest, config.max_model_len))

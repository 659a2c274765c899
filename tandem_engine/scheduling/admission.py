"""Checks whether a request can be served here, and builds its `Request`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from tandem_engine.messages import AddRequest
from tandem_engine.scheduling.block_hash import NUM_HASH_BYTES, BlockHash, HashChain
from tandem_engine.scheduling.kv_cache_manager import KVCacheManager
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.window_groups import most_blocks

RefusalReason = Literal["invalid", "context", "queue_full", "kv_full", "unsupported"]

_PLACES_PER_FREE_ONE = 7


class RequestRefused(Exception):
    """The request is refused; the message names the value, the limit and the remedy."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason
        self.message = message


def build_request(
    command: AddRequest, config: SchedulerConfig, *, arrival: int, added_ns: int, adapters: Collection[str] = ()
) -> Request:
    """Return the request of a command; raises RequestRefused if it could never be served.

    `adapters`: the names of those that the engine has loaded.
    """
    if command.adapter and command.adapter not in adapters:
        names = ", ".join(sorted(adapters)) or "none"
        raise RequestRefused("unsupported", f"no adapter {command.adapter!r} in this engine; its adapters: {names}")
    _check_tokens(command, config)
    _check_context(command, config)
    _check_choices(command)
    root = _block_hash("hash_root", command.hash_root) if command.hash_root else None
    keys = _block_hashes(command, config.block_size)
    request = Request(
        request_id=command.request_id,
        token_ids=list(command.token_ids),
        num_prompt_tokens=command.num_prompt_tokens,
        sampling=command.sampling,
        mode=command.mode,
        hash_root=root,
        block_hashes=keys,
        chain=None if root is None else _chain(command, root, keys, config.block_size),
        max_found_blocks=command.max_found_blocks,
        max_left_blocks=command.max_left_blocks,
        prefix={(block.group, block.index): block.extent for block in command.prefix},
        choice_seeds=tuple(command.choice_seeds),
        priority=command.priority,
        fairness_key=command.fairness_key,
        adapter=command.adapter,
        choice_of=command.choice_of or command.request_id,
        attempt=command.attempt,
        arrival=arrival,
        added_ns=added_ns,
    )
    _check_pool(request, config)
    return request


def max_kv_tokens(request: Request, config: SchedulerConfig) -> int:
    """Return the most KV slots a request can need: one for each token but the last, which nothing attends to."""
    if request.mode == "prefill":
        return request.num_tokens
    return min(request.num_prompt_tokens + request.sampling.max_tokens, config.context_length + 1) - 1


def check_places(num_places: int, num_taken: int, num_of_key: int, request: Request) -> None:
    """Raise RequestRefused if no place is free, or none for this request's fairness key.

    A key may have seven times as many places as are still free. Otherwise a client with a thousand requests would leave
    no place for a client with one. (Dynamic thresholds: Choudhury and Hahne, 1998.)
    """
    num_free = num_places - num_taken
    if num_free <= 0:
        message = f"{num_places} requests are here already; try again later or raise --max-num-waiting"
        raise RequestRefused("queue_full", message)
    if request.fairness_key and num_of_key > _PLACES_PER_FREE_ONE * num_free:
        message = (
            f"{num_of_key} of {num_taken} requests here are of {request.fairness_key!r} already, the last {num_free} "
            f"of {num_places} places are for others; try again later or raise --max-num-waiting"
        )
        raise RequestRefused("queue_full", message)


def kv_full(num_blocks: int, num_live: int, num_preempted: int, num_kept: int, kv: KVCacheManager) -> RequestRefused:
    kept = f"{num_kept} of them are kept for requests whose turn is earlier, " if num_kept else ""
    message = (
        f"{num_blocks} KV blocks are needed and one for each of {num_live} live requests, {kv.num_spare} of "
        f"{kv.pool.num_blocks} are available, {kept}{num_preempted} preempted requests wait; "
        "try again later or another worker"
    )
    return RequestRefused("kv_full", message)


def _check_tokens(command: AddRequest, config: SchedulerConfig) -> None:
    num_tokens, num_prompt_tokens = len(command.token_ids), command.num_prompt_tokens
    if not command.token_ids:
        raise RequestRefused("invalid", "the prompt has no tokens; send at least one")
    if not 1 <= num_prompt_tokens <= num_tokens:
        message = f"num_prompt_tokens is {num_prompt_tokens}, must be from 1 to the {num_tokens} tokens given"
        raise RequestRefused("invalid", message)
    low, high = min(command.token_ids), max(command.token_ids)
    if low < 0 or high >= config.vocab_size:
        bad = low if low < 0 else high
        raise RequestRefused("invalid", f"token id {bad} is not in this model's vocabulary of {config.vocab_size:,}")


def _check_context(command: AddRequest, config: SchedulerConfig) -> None:
    num_tokens, max_tokens = len(command.token_ids), command.sampling.max_tokens
    if num_tokens > config.context_length:
        message = (
            f"prompt has {num_tokens:,} tokens, this model takes {config.context_length:,}; "
            "shorten it or raise --max-model-len"
        )
        raise RequestRefused("context", message)
    if (num_answer_tokens := num_tokens - command.num_prompt_tokens) >= max_tokens:
        message = f"{num_answer_tokens:,} answer tokens were given already, max_tokens is {max_tokens:,}"
        raise RequestRefused("invalid", message)


def _check_choices(command: AddRequest) -> None:
    if command.mode != "prefill" and len(command.choice_seeds) > 1:
        message = f"{len(command.choice_seeds)} choices in {command.mode} mode; send one request per choice"
        raise RequestRefused("unsupported", message)


def _check_pool(request: Request, config: SchedulerConfig) -> None:
    num_kv_tokens = max_kv_tokens(request, config)
    num_needed = most_blocks(config, num_kv_tokens)
    if num_needed > config.num_blocks:
        num_answer_tokens = num_kv_tokens - request.num_prompt_tokens + 1
        in_groups = f" in {num_needed:,} blocks of all groups of layers" if config.num_window_groups else ""
        message = (
            f"{request.num_prompt_tokens:,} prompt tokens and up to {num_answer_tokens:,} answer tokens need "
            f"{num_kv_tokens:,} KV slots{in_groups}, this worker has {config.num_blocks * config.block_size:,} "
            f"({config.num_blocks:,} blocks of {config.block_size}); lower max_tokens, shorten the prompt or give the "
            "worker more KV memory"
        )
        raise RequestRefused("kv_full", message)


def _block_hashes(command: AddRequest, block_size: int) -> list[BlockHash]:
    num_full_blocks = len(command.token_ids) // block_size
    if len(command.block_hashes) > num_full_blocks:
        message = (
            f"{len(command.block_hashes)} block hashes for {num_full_blocks} full blocks of {block_size} tokens; "
            "hash with this worker's block size"
        )
        raise RequestRefused("invalid", message)
    return [_block_hash(f"block_hashes[{i}]", text) for i, text in enumerate(command.block_hashes)]


def _chain(command: AddRequest, root: BlockHash, keys: list[BlockHash], block_size: int) -> HashChain:
    given = command.chain
    if given is None:
        return HashChain(keys[-1] if keys else root, len(keys) * block_size, block_size)
    is_whole = given.grain > 0 and block_size % given.grain == 0 == given.num_tokens % given.grain
    if not is_whole or given.num_tokens // block_size != len(keys) or given.num_tokens > len(command.token_ids):
        message = (
            f"a chain of {given.num_tokens:,} tokens by {given.grain}, for {len(keys):,} block hashes and "
            f"{len(command.token_ids):,} tokens; hash whole grains that divide this worker's blocks of {block_size}"
        )
        raise RequestRefused("invalid", message)
    end, space = _block_hash("chain.block_hash", given.block_hash), _block_hash("chain.space", given.space)
    return HashChain(end, given.num_tokens, given.grain, space)


def _block_hash(name: str, text: str) -> BlockHash:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != NUM_HASH_BYTES:
        raise RequestRefused("invalid", f"{name} is {text[:40]!r}, must be {NUM_HASH_BYTES} bytes in hex")
    return BlockHash(value)

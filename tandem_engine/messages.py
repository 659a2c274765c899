"""Defines the messages between an engine process and its worker's front.

Messages are frozen structs, sent as length-prefixed MessagePack over a Unix socket pair (`channel`). Descriptors (the
pool's region, other processes' regions) travel as SCM_RIGHTS with the message that names them.

Commands go from front to engine, events from engine to front. Token positions are absolute; times are Unix
nanoseconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem_engine.extents import ExtentRef as ExtentRef
from tandem_engine.extents import PrefixBlock as PrefixBlock
from tandem_engine.layout import LayoutInfo as LayoutInfo
from tandem_engine.layout import SourceLayout as SourceLayout
from tandem_engine.sampling_params import SamplingParams

Mode = Literal["aggregated", "prefill", "decode"]
"""aggregated: computes prompt and answer. prefill: computes prompt and first token, holds the blocks until ReleaseHeld.
decode: reserves blocks at once; ImportSlab fills them; StartDecode starts the request."""

FinishReason = Literal["stop", "length"]

RegionKind = Literal["host", "device"]
"""host: shared memory. device: memory of a card, by a descriptor of its driver; its generations: shared memory."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A command or an event; the class name is its tag."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value inside a message."""


# ------------------------------------------------------------------------------------------------- commands


class ChainEnd(_Part, frozen=True):
    """The last hash that the gateway computed for a request, and how keys of later blocks follow from it."""

    block_hash: str
    """Hex: the hash, not the key, of the first `num_tokens` tokens; the root if there are none."""
    num_tokens: int
    """Whole grains. They may end behind the last block of `block_hashes`, but before the next block does."""
    grain: int
    """Tokens per hash; a block is a multiple of it."""
    space: str
    """Hex; a key is a hash XOR this."""


class AddRequest(Message, frozen=True):
    request_id: str
    token_ids: list[int]
    """Prompt; after a migration also the tokens that were generated before."""
    num_prompt_tokens: int
    sampling: SamplingParams
    mode: Mode = "aggregated"
    hash_root: str = ""
    """Hex, a key: it names model, account and space. Empty: this request neither finds nor leaves cached blocks."""
    block_hashes: list[str] = msgspec.field(default_factory=list)
    """Hex: the keys of the full blocks of `token_ids`."""
    chain: ChainEnd | None = None
    """None: keys are hashes, one per block, and the last one continues the chain (gateways of release 0.2)."""
    max_found_blocks: int | None = None
    """Leading blocks that may come from this pool's prefix cache or from `prefix`; None: all."""
    max_left_blocks: int | None = None
    """Leading blocks that others may find, here or through FilledBlocks; None: all, those of the answer included.
    Handing over to those who have the handle is not limited."""
    prefix: list[PrefixBlock] = msgspec.field(default_factory=list)
    """Not in decode mode: blocks of the prompt that the KV service has. The engine copies them when the request leaves
    the queue, as far as this pool lacks them and every generation still matches. The engine computes the rest."""
    adapter: str = ""
    """Name of a LoRA adapter of ModelInfo; its digest is in the root of the hashes. Empty: the model itself."""
    choice_seeds: list[int] = msgspec.field(default_factory=list)
    """prefill only: one first token is sampled per seed; empty: one token, with `sampling.seed`."""
    priority: int = 0
    fairness_key: str = ""
    choice_of: str = ""
    """decode only: the request that this is a choice of; empty: the request has no other choices."""
    attempt: int = 0
    """decode only: choices with the same one are offered together. If one is refused, the gateway takes all back."""


class ImportSlab(Message, frozen=True):
    """Copy blocks into a decode request's reserved slots; `first_block` counts in the group's block table."""

    request_id: str
    slab_index: int
    first_block: int
    extents: list[ExtentRef]
    group: int = 0
    layout: SourceLayout | None = None
    """Of the blocks, if it is not this engine's own: they are converted, and `first_block` counts in blocks of it. All
    slabs of a request have the same one."""


class StartDecode(Message, frozen=True):
    """All blocks of a decode request have arrived; `token_ids` (the first token) follow its prompt."""

    request_id: str
    token_ids: list[int]


class Recompute(Message, frozen=True):
    """The KV of a decode request will not arrive: compute its prompt here, from the first missing block."""

    request_id: str


class AbortRequest(Message, frozen=True):
    """Forget the request in whatever state it is, and free its blocks, held ones too. RequestAborted answers."""

    request_id: str


class ReleaseHeld(Message, frozen=True):
    """Free the held blocks of a prefill request: nobody needs them under its handle any more."""

    request_id: str


class ReleaseSlabs(Message, frozen=True):
    """Every reader has copied the leading `num_blocks` that were sealed for a prefill, of all groups, in the order of
    their messages: a staged region may use their slots again. No effect where the pool is the region."""

    request_id: str
    num_blocks: int


class MapRegion(Message, frozen=True):
    """Map another process's region, read-only; its descriptor comes with the message.

    A region of kind "device" comes with two: of its generations, and of its device memory.
    """

    region_id: str
    num_bytes: int
    """Of the memory with the slots; of kind "host" with the generations, too."""
    num_slots: int
    generations_offset: int
    """Where the table of uint64 generations, one per slot, starts; 0 in a descriptor of their own."""
    kind: RegionKind = "host"


class UnmapRegion(Message, frozen=True):
    region_id: str


class Ping(Message, frozen=True):
    """Asks whether the engine lives; Pong answers, after the running step."""


class Shutdown(Message, frozen=True):
    pass


# --------------------------------------------------------------------------------------------------- events


class LoadProgress(Message, frozen=True):
    stage: str
    """A plain sentence for people: "reading 310 MB of weights"."""
    fraction: float


class AdapterInfo(_Part, frozen=True):
    """A LoRA adapter that the engine has loaded."""

    name: str
    digest: str
    """Hex, of its files."""


class ModelInfo(_Part, frozen=True):
    model_id: str
    architecture: str
    num_parameters: int
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, float]
    """temperature, top_p, top_k, repetition_penalty, max_tokens: those that the checkpoint gives."""
    chat_template: str
    weights_digest: str
    quantization: str
    kv_dtype: str
    tokenizer_digest: str
    numerics_class: str
    asset_paths: dict[str, str]
    """Name -> path of tokenizer.json and tokenizer_config.json."""
    adapters: list[AdapterInfo] = msgspec.field(default_factory=list)
    """Sorted by name."""


class Ready(Message, frozen=True):
    """The engine serves. The region's descriptors come with the message: one, or two as in MapRegion."""

    model: ModelInfo
    layout: LayoutInfo
    num_blocks: int
    """Of the pool."""
    region_id: str
    """Of the region that others read: the pool itself, or memory that blocks are copied to (`max_held_slots`)."""
    region_bytes: int
    generations_offset: int
    num_slots: int
    bytes_per_slot: int
    """Slot i lies at byte `i * bytes_per_slot` of the region."""
    region_kind: RegionKind = "host"
    max_held_slots: int = 0
    """0: slot i is block i of the pool. Else slots hold copies of blocks, and a prefill has at most so many at once: a
    slot is used again after ReleaseHeld, or earlier after ReleaseSlabs."""
    numa_node: int | None = None
    """The NUMA node that weights and pool are taken from; None: no node is preferred."""
    tells_points: bool = False
    """Whether StepDone tells which sample points and ends of chains the pool has."""


class Reserved(Message, frozen=True):
    """The request was accepted. The first answer to every AddRequest is Reserved or Refused.

    A decode request has all blocks of its prompt now. The pool had `num_cached_blocks` leading blocks already, so no
    slab needs to bring them; 0 in other modes.
    """

    request_id: str
    num_cached_blocks: int


class Refused(Message, frozen=True):
    """The request was not accepted, and the engine keeps nothing of it."""

    request_id: str
    reason: Literal["invalid", "context", "queue_full", "kv_full", "unsupported"]
    message: str


class SlabImported(Message, frozen=True):
    request_id: str
    slab_index: int
    num_bytes: int
    error: str = ""
    """Empty if every generation still matched after the copy."""


class Logprob(_Part, frozen=True):
    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(_Part, frozen=True):
    chosen: Logprob
    top: list[Logprob]


class PhaseTimes(_Part, frozen=True):
    """Unix nanoseconds; 0: has not happened."""

    added_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0


class RequestOutput(_Part, frozen=True):
    request_id: str
    choice_index: int
    token_ids: list[int]
    position: int
    """Absolute position of token_ids[0]."""
    logprobs: list[PositionLogprobs] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    """For a prefill request: why the request is over with its first token, else None."""
    is_last: bool = False
    """Nothing more follows for this choice from this engine; the counts below are then final."""
    num_computed_tokens: int = 0
    """Prompt tokens run through the model here."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed: found in this pool's prefix cache, or loaded."""
    num_loaded_tokens: int = 0
    """Those of the cached tokens that were copied from `AddRequest.prefix`."""
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    """Draft tokens that ran behind the answer."""
    num_accepted_tokens: int = 0
    """Draft tokens that the model sampled too."""
    num_preemptions: int = 0
    times: PhaseTimes = msgspec.field(default_factory=PhaseTimes)


class SealedBlocks(_Part, frozen=True):
    """Complete blocks of a prefill request and one group, in block-table order from `first_block`.

    Of a group with a window, beside groups without, only the blocks that the answer attends to.
    """

    request_id: str
    first_block: int
    slots: list[int]
    generations: list[int]
    is_last: bool
    """Every block of the prompt is sealed now, a partly filled tail included."""
    checksums: list[int] = msgspec.field(default_factory=list)
    """xxh3-64, one per slot, from engines that verify; else empty."""
    group: int = 0
    region_id: str = ""
    """The region that the slots are of. Empty inside the engine only, where slots are blocks of the pool."""


class BlocksSealed(Message, frozen=True):
    """Blocks that are complete while their step still computes its tokens; its StepDone does not repeat them."""

    sealed: list[SealedBlocks]


class FilledBlocks(_Part, frozen=True):
    """Full blocks of one group that were computed here, in block-table order, with the hashes that identify them."""

    request_id: str
    parent: str
    """Hex: the hash of the block before the first one; empty if the first block is the prompt's first."""
    hashes: list[str]
    """Hex."""
    slots: list[int]
    generations: list[int]
    checksums: list[int] = msgspec.field(default_factory=list)
    """As in SealedBlocks."""
    group: int = 0
    region_id: str = ""
    """As in SealedBlocks."""
    first_block: int = 0
    """Index of the first block in the request's block table."""


class EngineStats(_Part, frozen=True):
    num_running: int
    num_waiting: int
    num_tokens_in_flight: int
    """Prompt tokens still to compute plus tokens in running requests' contexts."""
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_held_blocks: int
    counters: dict[str, float]
    """Totals since start, by the names in `scheduling.ledger.COUNTERS`; `longest_...` is the longest time."""


class PoolPoints(_Part, frozen=True):
    """Changes of the sample points and ends that the pool has: the first 8 bytes of their keys, one after the other."""

    stored: bytes
    evicted: bytes


class StepDone(Message, frozen=True):
    """What one step did. Also sent when only stats changed (a release, an abort), then without outputs."""

    step: int
    outputs: list[RequestOutput]
    sealed: list[SealedBlocks]
    stats: EngineStats
    filled: list[FilledBlocks] = msgspec.field(default_factory=list)
    admitted: list[str] = msgspec.field(default_factory=list)
    """Requests that left the queue: the blocks in their `AddRequest.prefix` are not needed any more."""
    points: PoolPoints | None = None
    """None: nothing has changed."""


class RequestAborted(Message, frozen=True):
    """Answers AbortRequest with what had been done for the request; zeros if the engine does not have it."""

    request_id: str
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_generated_tokens: int = 0


class DeviceMemoryUsed(Message, frozen=True):
    """The device memory that the engine holds. Sent behind Ready or EncoderReady, and when it has changed."""

    device_uuid: str
    """As CUDA gives it, without NVML's prefix; "": no CUDA device is in use."""
    num_bytes: int
    """By torch's allocator and the pool: the driver's own memory for the process, its context, is not counted."""


class Pong(Message, frozen=True):
    """Answers Ping."""


class RequestFailed(Message, frozen=True):
    request_id: str
    message: str
    is_callers_fault: bool = False
    """True: the request cannot be done. False: the engine failed."""


class EngineFailed(Message, frozen=True):
    """The engine cannot go on and will exit."""

    message: str
    kind: Literal["unsupported", "invalid", "internal"] = "internal"


RequestCommand = AddRequest | ImportSlab | StartDecode | Recompute | AbortRequest | ReleaseHeld | ReleaseSlabs
Command = RequestCommand | MapRegion | UnmapRegion | Ping | Shutdown
StepEvent = BlocksSealed | StepDone
RequestEvent = Reserved | Refused | SlabImported | RequestAborted | RequestFailed
EngineEvent = LoadProgress | Ready | RequestEvent | StepEvent | DeviceMemoryUsed | Pong | EngineFailed

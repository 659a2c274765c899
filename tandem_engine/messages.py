"""What do an engine process and the worker's front say to each other?

Frozen values, sent as length-prefixed JSON over a Unix socket pair (no pickle). Descriptors (the pool's region, other
processes' regions) ride along as SCM_RIGHTS with the message that names them.

Commands go front -> engine, events engine -> front. Token positions are absolute; times are Unix nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem_engine.extents import ExtentRef as ExtentRef
from tandem_engine.extents import PrefixBlock as PrefixBlock
from tandem_engine.layout import LayoutInfo as LayoutInfo
from tandem_engine.scheduling.sampling_params import SamplingParams

Mode = Literal["aggregated", "prefill", "decode"]
"""aggregated: prompt and answer here. prefill: prompt and first token, blocks held until ReleaseHeld.
decode: blocks are reserved at once, filled by ImportSlab, and StartDecode sets the request going."""

FinishReason = Literal["stop", "length"]


# ------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class AddRequest:
    request_id: str
    token_ids: list[int]
    """Prompt, and after a migration what was generated before."""
    num_prompt_tokens: int
    sampling: SamplingParams
    mode: Mode = "aggregated"
    hash_root: str = ""
    """Hex; empty: this request neither finds nor leaves cached blocks."""
    block_hashes: list[str] = field(default_factory=list)
    """Hex, one per full block of `token_ids`."""
    max_found_blocks: int | None = None
    """Only so many leading blocks may come from this pool's prefix cache or from `prefix`; None: all."""
    max_left_blocks: int | None = None
    """Only so many leading blocks may be found by others, here or by what is told of them; None: all, the answer's too.
    Handing over to those who have the handle is not bounded."""
    prefix: list[PrefixBlock] = field(default_factory=list)
    """Not in decode mode: what the KV service has of the prompt. Copied when the request leaves the queue, as far as
    this pool has no such block itself and every generation still matches; the rest is computed."""
    choice_seeds: list[int] = field(default_factory=list)
    """prefill only: one first token is sampled per seed; empty: one, with `sampling.seed`."""
    priority: int = 0
    fairness_key: str = ""


@dataclass(frozen=True)
class ImportSlab:
    """Copy blocks into a decode request's reserved slots; `first_block` counts in the group's block table."""

    request_id: str
    slab_index: int
    first_block: int
    extents: list[ExtentRef]
    group: int = 0


@dataclass(frozen=True)
class StartDecode:
    """All blocks of a decode request have come; `token_ids` (the first token) follow its prompt."""

    request_id: str
    token_ids: list[int]


@dataclass(frozen=True)
class Recompute:
    """The KV of a decode request will not come: compute its prompt here, from the first missing block."""

    request_id: str


@dataclass(frozen=True)
class OfferPrefix:
    """Where the blocks of a preempted request lie ready, in answer to StepDone.preempted: as in `AddRequest.prefix`.

    Never waited for: a request that runs again by then has computed them, and StepDone.admitted says so at once.
    """

    request_id: str
    prefix: list[PrefixBlock]


@dataclass(frozen=True)
class AbortRequest:
    """Forget the request wherever it is; unknown ids are ignored. Its blocks, held ones too, go back."""

    request_id: str


@dataclass(frozen=True)
class ReleaseHeld:
    """Nobody needs a prefill request's blocks under its handle any more."""

    request_id: str


@dataclass(frozen=True)
class MapRegion:
    """Map another process's region, read-only; its descriptor comes with the message."""

    region_id: str
    num_bytes: int
    num_slots: int
    generations_offset: int
    """Where the table of uint64 generations, one per slot, starts."""


@dataclass(frozen=True)
class UnmapRegion:
    region_id: str


@dataclass(frozen=True)
class Shutdown:
    pass


# --------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class LoadProgress:
    stage: str
    """A plain sentence for people: "reading 310 MB of weights"."""
    fraction: float


@dataclass(frozen=True)
class ModelInfo:
    model_id: str
    architecture: str
    num_parameters: int
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    generation_defaults: dict[str, float]
    """temperature, top_p, top_k, repetition_penalty, max_tokens: those the checkpoint gives."""
    chat_template: str
    weights_digest: str
    quantization: str
    kv_dtype: str
    tokenizer_digest: str
    numerics_class: str
    asset_paths: dict[str, str]
    """Name -> path of tokenizer.json and tokenizer_config.json."""


@dataclass(frozen=True)
class Ready:
    """The engine serves. The pool's region descriptor comes with the message where the pool is in shared memory."""

    model: ModelInfo
    layout: LayoutInfo
    num_blocks: int
    region_id: str
    """Slot i of the region is block i of the pool; `offset = slot * bytes_per_block`."""
    region_bytes: int
    generations_offset: int


@dataclass(frozen=True)
class Reserved:
    """The request was taken: every AddRequest is answered with Reserved or Refused, before anything else.

    A decode request has all blocks of its prompt now; `num_cached_blocks` leading ones were found here (0 in other
    modes), so that no slab need bring them.
    """

    request_id: str
    num_cached_blocks: int


@dataclass(frozen=True)
class Refused:
    """The request was not taken, and nothing of it is kept."""

    request_id: str
    reason: Literal["invalid", "context", "queue_full", "kv_full", "unsupported"]
    message: str


@dataclass(frozen=True)
class SlabImported:
    request_id: str
    slab_index: int
    num_bytes: int
    error: str = ""
    """Empty if every generation still matched after the copy."""


@dataclass(frozen=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class PositionLogprobs:
    chosen: Logprob
    top: list[Logprob]


@dataclass(frozen=True)
class PhaseTimes:
    """Unix nanoseconds; 0: has not happened."""

    added_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    choice_index: int
    token_ids: list[int]
    position: int
    """Absolute position of token_ids[0]."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """For a prefill request: why the request is over with its first token, else None."""
    is_last: bool = False
    """Nothing more comes for this choice from this engine; the counts below are then final."""
    num_computed_tokens: int = 0
    """Prompt tokens run through the model here."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed: found in this pool's prefix cache, or loaded."""
    num_loaded_tokens: int = 0
    """Those of them that were copied from `AddRequest.prefix`."""
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    """Tokens of the answer that were guessed ahead."""
    num_accepted_tokens: int = 0
    """Those of them that the model drew, too."""
    num_preemptions: int = 0
    times: PhaseTimes = field(default_factory=PhaseTimes)


@dataclass(frozen=True)
class SealedBlocks:
    """Blocks of a prefill request and one group that are complete, in block-table order from `first_block`.

    Of a group with a window, beside others without, only those that the answer sees.
    """

    request_id: str
    first_block: int
    slots: list[int]
    generations: list[int]
    is_last: bool
    """Every block of the prompt is sealed now, a partly filled tail included."""
    checksums: list[int] = field(default_factory=list)
    """xxh3-64, one per slot, from engines that verify; else empty."""
    group: int = 0


@dataclass(frozen=True)
class BlocksSealed:
    """Blocks that are complete while their step still computes its tokens; its StepDone does not repeat them."""

    sealed: list[SealedBlocks]


@dataclass(frozen=True)
class FilledBlocks:
    """Full blocks of one group that were computed here, in block-table order; others may want them by these hashes."""

    request_id: str
    parent: str
    """Hex: the hash of the block before the first one; empty if that is the prompt's first."""
    hashes: list[str]
    """Hex."""
    slots: list[int]
    generations: list[int]
    checksums: list[int] = field(default_factory=list)
    """As in SealedBlocks."""
    group: int = 0


@dataclass(frozen=True)
class EngineStats:
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
    """Totals since start: steps, prompt_tokens_computed, prompt_tokens_cached, tokens_generated, preemptions,
    step_seconds, reprefill_tokens, blocks_imported, bytes_imported, prompt_tokens_loaded, blocks_corrupt,
    blocks_recovered (loaded for requests that were preempted), draft_tokens, draft_tokens_accepted."""


@dataclass(frozen=True)
class StepDone:
    """What one step did. Sent also when only stats changed (a release, an abort), then without outputs."""

    step: int
    outputs: list[RequestOutput]
    sealed: list[SealedBlocks]
    stats: EngineStats
    filled: list[FilledBlocks] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    """Requests that left the queue: what `AddRequest.prefix` or `OfferPrefix` named is not needed any more."""
    preempted: dict[str, list[str]] = field(default_factory=dict)
    """Requests that lost their blocks where loading should be faster than computing them again (OfferPrefix), with the
    hashes, in hex, of their leading full blocks, the answer's too: others were told of these as they were filled."""


@dataclass(frozen=True)
class RequestFailed:
    request_id: str
    message: str
    is_callers_fault: bool = False
    """What was asked for cannot be done; else something broke."""


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot go on and will exit."""

    message: str
    kind: Literal["unsupported", "invalid", "internal"] = "internal"


RequestCommand = AddRequest | ImportSlab | StartDecode | Recompute | OfferPrefix | AbortRequest | ReleaseHeld
Command = RequestCommand | MapRegion | UnmapRegion | Shutdown
StepEvent = BlocksSealed | StepDone
EngineEvent = LoadProgress | Ready | Reserved | Refused | SlabImported | StepEvent | RequestFailed | EngineFailed

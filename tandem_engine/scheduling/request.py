"""Holds the state of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from tandem_engine.messages import ExtentRef, FinishReason, Mode, PositionLogprobs
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import BlockHash, HashChain


class RequestState(Enum):
    """
    aggregated  WAITING -> RUNNING -> FINISHED
    prefill     WAITING -> RUNNING -> HELD -> FINISHED
    decode      IMPORTING -> READY -> RUNNING -> FINISHED
    When blocks run out, all but prefill: RUNNING or READY -> PREEMPTED -> RUNNING. When seats run out, an answer of a
    lower class: RUNNING -> READY. An abort leads from any state to FINISHED.
    """

    WAITING = auto()
    IMPORTING = auto()
    """A decode request has its blocks and waits for their content."""
    READY = auto()
    """It has its blocks and waits for a seat."""
    RUNNING = auto()
    """It has a seat: it may be in a step."""
    PREEMPTED = auto()
    """Its blocks were freed. It waits ahead of requests that have not run yet, and then computes its tokens again."""
    HELD = auto()
    """A prefill request is done; its blocks stay for the workers that pull them."""
    FINISHED = auto()


class Sampled(NamedTuple):
    """A token sampled for one choice of one request in one step."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One generated run of tokens. Only the Scheduler and its parts change it; the runner reads it.

    `token_ids` is the prompt and the answer so far. The KV of the first `num_computed_tokens` tokens exists, in the
    blocks of `block_table`. The next step computes the token that was sampled last.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    mode: Mode = "aggregated"
    hash_root: BlockHash | None = None
    """None: the request neither finds nor leaves cached blocks."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """The keys of full blocks: those that came with the request, then those made from `chain`."""
    chain: HashChain | None = None
    """None if `hash_root` is."""
    max_found_blocks: int | None = None
    """Leading blocks that may come from caches; None: all."""
    max_left_blocks: int | None = None
    """Leading blocks that others may find; None: all."""
    prefix: dict[tuple[int, int], ExtentRef] = field(default_factory=dict)
    """Sources of full blocks that can be copied, by group and index into its block table."""
    choice_seeds: tuple[int, ...] = ()
    """One token is sampled per seed; `sampling.seed` if the command has none."""
    priority: int = 0
    effective_priority: int = field(init=False)
    """Its own priority, or a higher one if its class waited too long."""
    fairness_key: str = ""
    adapter: str = ""
    """Name of a LoRA adapter; empty: the model itself."""
    choice_of: str = ""
    attempt: int = 0
    """Choices of one request with the same attempt are offered together."""
    arrival: int = 0
    """Counts requests; a smaller number arrived earlier."""

    state: RequestState = RequestState.WAITING
    block_table: list[int] = field(default_factory=list)
    window_tables: list[list[int]] = field(default_factory=list)
    """Block tables of groups of layers with a window, if other layers have none (`WindowGroups`)."""
    num_computed_tokens: int = 0
    num_initial_tokens: int = field(init=False)
    """Length of `token_ids` when the request was added; after a migration it includes tokens of the answer."""
    num_found_blocks: int = 0
    """Leading blocks of `block_table` that came from the prefix cache: shared, never written."""
    num_registered_blocks: int = 0
    """Leading blocks that were registered in the prefix cache."""
    num_dropped_blocks: int = 0
    """Leading entries of `window_tables`, or of `block_table` if there are none, that lie behind the window of every
    layer. These blocks were freed or never allocated; the entries have no meaning and nothing reads them."""
    num_sealed_blocks: int = 0
    imported_blocks: set[tuple[int, int]] = field(default_factory=set)
    """Blocks whose content was imported: groups and indices into their block tables, of the writer's layout."""
    imported_block_size: int = 0
    """Tokens per imported block; 0: nothing was imported."""
    first_whole_block: int = 0
    """Of `window_tables`: the block before it may lack tokens behind the window, so that others must not find it."""
    is_release_due: bool = False
    """ReleaseHeld arrived before the prefill was done."""

    num_prompt_tokens_accounted: int = 0
    num_prompt_tokens_computed: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_generated_tokens: int = 0
    """Tokens sampled here, without those that came with the request or with StartDecode."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that the model sampled too."""
    num_preemptions: int = 0
    added_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0

    def __post_init__(self) -> None:
        self.num_initial_tokens = len(self.token_ids)
        self.effective_priority = self.priority
        self.choice_seeds = self.choice_seeds or (self.sampling.seed,)

    @property
    def tables(self) -> list[list[int]]:
        """The block tables of all groups."""
        return [self.block_table, *self.window_tables]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_tokens_in_flight(self) -> int:
        """What the request adds to the report: a prefill's tokens to compute, the context of what decodes."""
        return self.num_tokens_to_compute if self.mode == "prefill" else self.num_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next run is one token that continues an answer."""
        return self.num_tokens_to_compute == 1 and self.num_computed_tokens > 0

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: higher effective priority, then earlier arrival."""
        return (-self.effective_priority, self.arrival)

    def finish_reason_with(self, answer: Sequence[int], context_length: int) -> FinishReason | None:
        """Return why the request is over once `answer` follows `token_ids`, or None while it goes on.

        A stop token has precedence over a limit that is reached with it. The last token needs no KV slot, so prompt
        and answer may have one token more than the context.
        """
        num_tokens = len(self.token_ids) + len(answer)
        last = answer[-1] if answer else self.token_ids[-1]
        if last in self.sampling.stop_token_ids and num_tokens > self.num_prompt_tokens:
            return "stop"
        if num_tokens - self.num_prompt_tokens >= self.sampling.max_tokens or num_tokens > context_length:
            return "length"
        return None

"""Where does one request stand?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from tandem_engine.messages import ExtentRef, FinishReason, Mode, PositionLogprobs
from tandem_engine.scheduling.block_hash import BlockHash
from tandem_engine.scheduling.sampling_params import SamplingParams


class RequestState(Enum):
    """
    aggregated  WAITING -> RUNNING -> FINISHED
    prefill     WAITING -> RUNNING -> HELD -> FINISHED
    decode      IMPORTING -> RUNNING -> FINISHED
    all but prefill, when blocks run out: RUNNING -> PREEMPTED -> RUNNING; an abort leads from anywhere to FINISHED.
    """

    WAITING = auto()
    IMPORTING = auto()
    """A decode request has its blocks; their content is on its way."""
    RUNNING = auto()
    PREEMPTED = auto()
    """Its blocks were taken; it waits, ahead of those that have not run yet, and computes its tokens again."""
    HELD = auto()
    """A prefill request is done; its blocks stay for those who pull them."""
    FINISHED = auto()


class Sampled(NamedTuple):
    """A token drawn for one choice of one request in one step."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One generated run of tokens. Only the Scheduler and its parts write it; the runner reads it.

    `token_ids` is the prompt and the answer so far; the KV of the first `num_computed_tokens` of them exists, in the
    blocks of `block_table`. The token last sampled is not computed before the next step.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    mode: Mode = "aggregated"
    hash_root: BlockHash | None = None
    """None: neither finds nor leaves cached blocks."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    max_found_blocks: int | None = None
    """Only so many leading blocks may come from caches; None: all."""
    max_left_blocks: int | None = None
    """Only so many leading blocks may be found by others; None: all."""
    prefix: dict[tuple[int, int], ExtentRef] = field(default_factory=dict)
    """Where the content of full blocks lies ready, by group and index into its block table."""
    choice_seeds: tuple[int, ...] = ()
    """One token is sampled per seed; never empty once built: `sampling.seed` if none was given."""
    priority: int = 0
    standing: int = field(init=False)
    """The priority it runs with: its own, or a higher one if its class had waited too long."""
    fairness_key: str = ""
    arrival: int = 0
    """Counts requests; a smaller one came earlier."""

    state: RequestState = RequestState.WAITING
    block_table: list[int] = field(default_factory=list)
    window_tables: list[list[int]] = field(default_factory=list)
    """Of groups of layers with a window, if others have none (`WindowGroups`); then `block_table` is the others'."""
    num_computed_tokens: int = 0
    num_given_tokens: int = field(init=False)
    """Length of `token_ids` when the request was added: the answer's first tokens come with it after a migration."""
    num_found_blocks: int = 0
    """Leading blocks of `block_table` that came from the prefix cache and are shared: never written."""
    num_registered_blocks: int = 0
    """Leading blocks that were offered to the prefix cache."""
    num_dropped_blocks: int = 0
    """Leading entries that are not ours: given back, or never had, since they lie behind the window of every layer. Of
    `window_tables`, where there are any, else of `block_table`. Nothing reads them; what they say means nothing."""
    num_sealed_blocks: int = 0
    imported_blocks: set[tuple[int, int]] = field(default_factory=set)
    """Groups and indices into their block tables of blocks whose content has come from elsewhere."""
    is_release_due: bool = False
    """ReleaseHeld came before the prefill was done."""

    num_prompt_tokens_accounted: int = 0
    num_prompt_tokens_computed: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_generated_tokens: int = 0
    """Sampled here; tokens that came with the request or with StartDecode are not counted."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of its draft tokens: those that the model drew, too."""
    num_preemptions: int = 0
    added_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0

    def __post_init__(self) -> None:
        self.num_given_tokens = len(self.token_ids)
        self.standing = self.priority
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
    def is_decoding(self) -> bool:
        """Whether its next run is one token, and answers with one."""
        return self.num_tokens_to_compute == 1 and self.num_computed_tokens > 0

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: higher standing, then earlier arrival."""
        return (-self.standing, self.arrival)

    def finish_reason_with(self, answer: Sequence[int], context_length: int) -> FinishReason | None:
        """Return why the request is over once `answer` follows `token_ids`, or None while it goes on.

        A stop token wins over a limit reached with it. The last token takes no KV slot, so prompt and answer may have
        one token more than the context.
        """
        num_tokens = len(self.token_ids) + len(answer)
        last = answer[-1] if answer else self.token_ids[-1]
        if last in self.sampling.stop_token_ids and num_tokens > self.num_prompt_tokens:
            return "stop"
        if num_tokens - self.num_prompt_tokens >= self.sampling.max_tokens or num_tokens > context_length:
            return "length"
        return None

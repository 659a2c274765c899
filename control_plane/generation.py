"""Defines the values that pass between the HTTP API, the text pipeline and the dispatcher.

The API makes a `CompletionRequest` or `ChatRequest` from a validated body. The text pipeline turns that request into a
`TokenRequest` and submits it to the dispatcher. The dispatcher returns a `TokenStream`, whose tokens the text pipeline
turns into `TextDelta`s.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol, get_args, overload

import msgspec

from control_plane.explain.history import History
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.model_table import WireFormat

FinishReason = Literal["stop", "length"]
"""Why the tokens end."""
AnswerEnd = Literal["stop", "length", "tool_calls"]
"""Why an answer ends, in the client's response."""

ModelTask = Literal["text-generation", "text-embedding", "text-classification", "text-ranking"]

DEFAULT_GRAIN = 16
"""Tokens per hash of a prompt; --hash-grain."""

CacheMode = Literal["on", "read", "write", "off"]
CACHE_MODES: tuple[CacheMode, ...] = get_args(CacheMode)


@dataclass(frozen=True)
class CachePolicy:
    """Which cached blocks a request may find, and which blocks it may leave for later requests.

    The request sets a policy, and the operator sets one for the account. The stricter of both applies, to finding and
    to leaving separately; of two bounds the smaller one applies. Without a bound, the answer's blocks are left too. A
    bound counts tokens of the prompt, in whole blocks.
    """

    finds: bool = True
    leaves: bool = True
    max_tokens: int | None = None
    """Leading tokens of the prompt that may be found or left; None: all."""

    @classmethod
    def of(cls, mode: CacheMode, max_tokens: int | None = None) -> CachePolicy:
        """on: finds and leaves; read: leaves nothing; write: finds nothing; off: neither."""
        return cls(mode in ("on", "read"), mode in ("on", "write"), max_tokens)

    def within(self, other: CachePolicy) -> CachePolicy:
        """Return the policy that both allow."""
        bounds = [bound for bound in (self.max_tokens, other.max_tokens) if bound is not None]
        return CachePolicy(self.finds and other.finds, self.leaves and other.leaves, min(bounds, default=None))

    def max_found_blocks(self, num_prompt_tokens: int, block_size: int) -> int | None:
        """Return how many leading blocks may come from a cache; None: all."""
        return self._max_blocks(self.finds, num_prompt_tokens, block_size)

    def max_left_blocks(self, num_prompt_tokens: int, block_size: int) -> int | None:
        """Return how many leading blocks later requests may find; None: all blocks of prompt and answer."""
        return self._max_blocks(self.leaves, num_prompt_tokens, block_size)

    def _max_blocks(self, is_allowed: bool, num_prompt_tokens: int, block_size: int) -> int | None:
        if not is_allowed:
            return 0
        return None if self.max_tokens is None else min(self.max_tokens, num_prompt_tokens) // block_size


EVERYTHING = CachePolicy()
NOTHING = CachePolicy.of("off")


@dataclass(frozen=True)
class AccountPolicies:
    """The policy of each account, from the operator's setting."""

    by_account: Mapping[str, CachePolicy] = field(default_factory=dict)
    others: CachePolicy = EVERYTHING

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AccountPolicies:
        """Parse `ACCOUNT=MODE` and `ACCOUNT=MODE:TOKENS`, `*` for all others; raises ValueError."""
        policies: dict[str, CachePolicy] = {}
        for entry in entries:
            account, policy = _parse(entry)
            if account in policies:
                raise ValueError(f"prompt_cache_accounts names {account!r} twice; keep one entry")
            policies[account] = policy
        return cls(policies, policies.pop("*", EVERYTHING))

    def of(self, account: str) -> CachePolicy:
        return self.by_account.get(account, self.others)


def _parse(entry: str) -> tuple[str, CachePolicy]:
    account, equals, rule = entry.rpartition("=")
    word, colon, bound = rule.partition(":")
    mode = next((mode for mode in CACHE_MODES if mode == word), None)
    has_bound = bound.isascii() and bound.isdecimal()
    if not account or not equals or mode is None or has_bound != bool(colon):
        raise ValueError(
            f"prompt_cache_accounts has {entry!r}, which is no rule; write ACCOUNT=MODE or ACCOUNT=MODE:TOKENS, the "
            f"mode one of {', '.join(CACHE_MODES)}, and * for all other accounts"
        )
    return account, CachePolicy.of(mode, int(bound) if has_bound else None)


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of a model."""

    name: str
    digest: str
    """Hex, of its files. The roots of block hashes include it: no cached block is of two adapters."""


class TokenIds(Sequence[int]):
    """Token ids in four bytes each. Equal to any sequence of the same ids; a slice is packed, too."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = ids if isinstance(ids, array) else array("I", ids)

    @classmethod
    def unpack(cls, packed: bytes) -> TokenIds:
        """Return the ids of `packed()`; four little-endian bytes each."""
        ids = array("I")
        ids.frombytes(packed)
        if sys.byteorder == "big":
            ids.byteswap()
        return cls(ids)

    def packed(self) -> bytes:
        ids = self._ids
        if sys.byteorder == "big":
            ids = array("I", ids)
            ids.byteswap()
        return ids.tobytes()

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> TokenIds: ...
    def __getitem__(self, place: int | slice) -> int | TokenIds:
        return TokenIds(self._ids[place]) if isinstance(place, slice) else self._ids[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._ids == other._ids
        return isinstance(other, Sequence) and len(other) == len(self) and all(map(int.__eq__, self, other))

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return f"TokenIds({len(self)} ids)"


@dataclass(frozen=True)
class WirePrompt:
    """A prompt in the form in which workers receive it. Text processes compute it, off the event loop."""

    token_ids: bytes = field(repr=False)
    """A serialized Submit that has the token ids only."""
    hash_root: bytes
    """The root of the block hashes; b"" if none were computed."""
    hashes: bytes = field(default=b"", repr=False)
    """The hashes of all full blocks of `hash_grain` tokens, 16 bytes each; the public blocks first."""
    num_public_blocks: int = 0
    block_hashes: bytes = field(default=b"", repr=False)
    """A serialized Submit that has the block hashes only."""


@dataclass(frozen=True)
class TokenRequest:
    """One prompt for the dispatcher: token ids only (law 1 in docs/architecture.md)."""

    request_id: str
    account: str
    model_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    choice_seeds: tuple[int, ...]
    """One per choice; choice i is sampled with seed i."""
    deadline: float
    """By `time.monotonic`: a step of the machine's clock ends no request, and delays no end."""
    salt: bytes = b""
    """The caller's own salt: only requests of the account with the same salt share the prompt's cache."""
    cache: CachePolicy = EVERYTHING
    """The caller's cache policy; readiness probes neither find nor leave blocks."""
    num_public_tokens: int = 0
    """Leading tokens of a text that the operator marked public."""
    priority: int = 0
    session_affinity: str = ""
    reject_if_busy: bool = False
    is_probe: bool = False
    """A readiness probe: it passes every phase at any cost, and is never quarantined."""
    adapter: Adapter | None = None
    """None: the model itself."""
    wire: WirePrompt | None = None
    """The same prompt, ready for the wire; None: the dispatcher computes it."""
    history: History = field(default_factory=History, compare=False, repr=False)
    """What the dispatcher does for the request, for its explanation."""


@dataclass(frozen=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class PositionLogprobs:
    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True)
class PhaseWork:
    """What the phases of one request did. Cached tokens that are not counted here were in the worker's own pool."""

    num_store_tokens: int = 0
    """Copied from the store of the worker's host."""
    num_remote_tokens: int = 0
    """Fetched into that store from another host's store."""
    num_reprefill_tokens: int = 0
    """Computed by decode although prefill had computed them."""
    num_bytes_moved: int = 0
    prefill_us: int = 0
    """Microseconds between a worker's first and last step for the prompt; shared by all requests of a batch."""
    decode_us: int = 0

    def __add__(self, other: PhaseWork) -> PhaseWork:
        return PhaseWork(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Usage:
    """What the phases of one request did; `num_prompt_tokens == num_computed_tokens + num_cached_tokens`."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    """Summed over choices."""
    work: PhaseWork = PhaseWork()
    microneurons: int | None = None
    """The price, in millionths of a neuron; None: not priced."""
    num_thinking_tokens: int = 0
    """The part of the completion tokens that came before the answers, over choices."""
    num_seams: int = 0
    """Places where the tokens of another numerics class begin, over choices."""

    @property
    def num_pool_tokens(self) -> int:
        """Found in the worker's own KV pool."""
        return self.num_cached_tokens - self.work.num_store_tokens - self.work.num_remote_tokens

    def __add__(self, other: Usage) -> Usage:
        prices = [price for price in (self.microneurons, other.microneurons) if price is not None]
        return Usage(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_computed_tokens + other.num_computed_tokens,
            self.num_cached_tokens + other.num_cached_tokens,
            self.num_completion_tokens + other.num_completion_tokens,
            self.work + other.work,
            sum(prices) if prices else None,
            self.num_thinking_tokens + other.num_thinking_tokens,
            self.num_seams + other.num_seams,
        )

    def __post_init__(self) -> None:
        assert self.num_prompt_tokens == self.num_computed_tokens + self.num_cached_tokens, "prompt = computed + cached"

    def __sub__(self, earlier: Usage) -> Usage:
        """Return the difference to `earlier`, of the same request."""
        return Usage(
            self.num_prompt_tokens - earlier.num_prompt_tokens,
            self.num_computed_tokens - earlier.num_computed_tokens,
            self.num_cached_tokens - earlier.num_cached_tokens,
            self.num_completion_tokens - earlier.num_completion_tokens,
            num_thinking_tokens=self.num_thinking_tokens - earlier.num_thinking_tokens,
        )


class TokenDelta(msgspec.Struct, frozen=True, gc=False):  # cheap to make: there is one for every token
    """New tokens of one choice. `finish_reason` comes with the last tokens of that choice."""

    choice_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class TokenStream(Protocol):
    """Tokens of all choices in the order of arrival. Ends after every choice has finished or was stopped.

    Iterating raises a TandemError if the request is refused or fails. `aclose()` cancels what still runs and returns
    once the cancels are sent; it may be called at any time, more than once.
    """

    @property
    def route(self) -> Mapping[str, Any]:
        """The chosen workers, predicted milliseconds and the reason; for headers and traces."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    def batches(self) -> AsyncIterator[Iterator[TokenDelta]]:
        """Yield the same tokens, all new tokens at a time; tokens taken from a batch count as delivered.

        Read a batch to its end before the next one. Use this instead of plain iteration, not beside it.
        """

    def stop_choice(self, choice_index: int) -> None:
        """End one choice early (a stop string was found); its undelivered tokens are dropped and not billed."""

    async def aclose(self) -> None: ...

    async def num_unfinished_tokens(self) -> int:
        """After `aclose` before the first token: return how many tokens of the prompt workers report as computed.

        Returns within some seconds; 0 if no worker had begun or none reports.
        """

    @property
    def usage(self) -> Usage:
        """Final once iteration has ended; the counts so far before that."""


class Dispatcher(Protocol):
    async def submit(self, request: TokenRequest) -> TokenStream:
        """Route and start a request.

        Returns once a worker has accepted it, so that refusals (unknown model, context, overload) still become an
        HTTP status. Raises tandem_runtime.errors.TandemError.
        """


class EncoderFacts(msgspec.Struct, frozen=True):
    """What an encoder makes of one input."""

    num_values: int
    """Dimensions of an embedding, classes of a classifier, 1 for a ranking."""
    labels: tuple[str, ...] = ()
    """Of the classes, in the order of the values."""
    pooling: str = ""
    """Of embeddings: "mean", "cls" or "last"."""
    is_normalized: bool = False
    """An embedding has the length 1."""
    has_pairs: bool = False
    """An input may have two texts."""


class EncoderInput(msgspec.Struct, frozen=True):
    """One text, or a pair of texts, as an encoder reads it."""

    token_ids: bytes
    """Four little-endian bytes each; the model's special tokens included."""
    num_first_tokens: int = 0
    """Of a pair: tokens of the first text and its special tokens; 0: one text."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True)
class EncodingRequest:
    """Texts for encode workers: token ids only (law 1 in docs/architecture.md)."""

    request_id: str
    account: str
    model: ModelDescription
    inputs: Sequence[EncoderInput] = field(repr=False)
    deadline: float
    """By `time.monotonic`."""
    pooling: str = ""
    """Of embeddings: "mean", "cls" or "last"; "": the model's."""
    reject_if_busy: bool = False
    priority: int = 0
    """As of a TokenRequest."""
    history: History = field(default_factory=History, compare=False, repr=False)
    """What the dispatcher does for the request, for its explanation."""


class EncodingDispatcher(Protocol):
    async def encode(self, request: EncodingRequest, computed: list[int]) -> bytes:
        """Return the values of all inputs: float32, little-endian, [inputs, num_values].

        Appends to `computed` the tokens of each part that a worker has answered, also of a request that then fails.
        Raises tandem_runtime.errors.TandemError.
        """


@dataclass(frozen=True)
class ModelDescription:
    """A model as clients and the text pipeline see it, made from a worker's ModelCard."""

    model_id: str
    aliases: tuple[str, ...]
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str
    """Jinja source, "" if the model has none."""
    generation_defaults: Mapping[str, float]
    identity: str
    """Hex of what all workers of the model have equal: weights, quantization and tokenizer."""
    fingerprint: str
    """Hex of Fingerprint.digest of the numerics class that most workers have."""
    numerics_class: str
    created_unix_seconds: int
    architecture: str
    num_parameters: int
    tokenizer_json: bytes = field(repr=False)
    tokenizer_config: Mapping[str, Any] = field(repr=False)
    """Special tokens by name (bos_token, eos_token), for templates."""
    wire_format: WireFormat = "native"
    """The answers of `AI.run` and /ai/run: native for Workers AI's older models, OpenAI's for its newer models."""
    is_fallback: bool = False
    """This model answers in place of the requested model, which is not loaded."""
    task: ModelTask = "text-generation"
    encoder: EncoderFacts | None = None
    """Of a model that writes no text."""
    text_digest: str = ""
    """Of the tokenizer's files and the chat template."""
    hash_grain: int = DEFAULT_GRAIN
    """Tokens per hash of a prompt."""
    adapters: tuple[Adapter, ...] = ()
    """That its workers have loaded, sorted by name."""
    adapter: Adapter | None = None
    """That the caller asked for; None: the model itself."""

    @property
    def text_key(self) -> str:
        """What its tokenizer and template are loaded under: models with the same files share them."""
        return self.text_digest or self.identity

    @cached_property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            self.model_id,
            self.context_length,
            self.vocab_size,
            self.eos_token_ids,
            self.chat_template,
            dict(self.generation_defaults),
            self.identity,
            self.wire_format,
            self.task,
            self.encoder,
            self.hash_grain,
            self.adapter,
        )


class ModelFacts(msgspec.Struct, frozen=True):
    """What the preparation of a prompt needs to know of its model, besides the tokenizer."""

    model_id: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str
    generation_defaults: dict[str, float]
    identity: str
    wire_format: WireFormat
    task: ModelTask = "text-generation"
    encoder: EncoderFacts | None = None
    hash_grain: int = DEFAULT_GRAIN
    adapter: Adapter | None = None

    @property
    def facts(self) -> ModelFacts:
        return self


class ModelCatalog(Protocol):
    async def get(self, name: str) -> ModelDescription:
        """Return the model with that id or alias; raises ModelNotFound with the served models."""

    def list(self) -> list[ModelDescription]:
        """Return every model that a ready worker serves, sorted by id."""

"""The JSON of a request's explanation and of a row of the list, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from control_plane.api.answer_classes import SeamObject
from control_plane.explain.explanation import MoveKind, PhaseName, ProcessName, SegmentName, State


class RequestRow(TypedDict):
    """One request. Milliseconds count from its head."""

    id: str
    account: str
    model: str
    operation: str
    state: State
    started_ms: int
    ttft_ms: float | None
    duration_ms: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_per_second: float | None
    prefill: str
    decode: str
    error: str


class RequestList(TypedDict):
    object: Literal["list"]
    data: list[RequestRow]


class SegmentObject(TypedDict):
    """A part of the time to the first token."""

    name: SegmentName
    process: ProcessName
    worker: str
    start_ms: float
    duration_ms: float


class PhaseObject(TypedDict):
    """A part of the whole request; phases may overlap."""

    name: PhaseName
    worker: str
    start_ms: float
    duration_ms: float
    num_tokens: int


class ExpectedHandOverObject(TypedDict):
    """What the router expected of the hand-over from a prefill worker's host to the decode worker's."""

    from_host: str
    to_host: str
    num_bytes: int
    fixed_ms: float
    transfer_ms: float
    wait_ms: float
    bytes_per_second: int


class CandidateObject(TypedDict):
    """A worker that the router compared."""

    role: Literal["prefill", "decode"]
    worker: str
    predicted_ms: float
    queue_ms: float
    load_ms: float
    compute_ms: float
    hand_over_ms: float | None
    cached_tokens: dict[str, int]
    load: float
    is_chosen: bool
    hand_over: ExpectedHandOverObject | None


class AttemptObject(TypedDict):
    attempt: int
    prefill: str
    decode: str
    outcome: str


class RouteObject(TypedDict):
    mode: Literal["handed_over", "local"]
    prefill: str
    decode: str
    reason: str
    predicted_ms: dict[str, float]
    candidates: list[CandidateObject]
    runner_up: CandidateObject | None
    attempts: list[AttemptObject]


class GrantObject(TypedDict):
    """What a worker's grant left before the request was sent there."""

    number: int
    num_tokens: int
    num_requests: int


class AdmissionObject(TypedDict):
    """How the request stood among those that waited for its model when it came."""

    service_class: Literal["batch", "default", "priority"]
    predicted_wait_ms: float
    num_waiting: int
    num_waiting_elsewhere: int
    cost_ms: float
    used_ms: float
    grant: GrantObject | None
    prefill_grant: GrantObject | None


class CrossingObject(TypedDict):
    """Where the answer goes on with the tokens of another numerics class."""

    position: int
    from_class: str
    to_class: str


MoveObject = TypedDict(  # `from` is a keyword
    "MoveObject",
    {
        "time_ms": float,
        "kind": MoveKind,
        "from": str,
        "to": str,
        "why": str,
        "num_bytes": int,
        "num_tokens": int,
        "duration_ms": float,
        "transport": str,
        "seam": CrossingObject | None,
    },
)


class UsageParts(TypedDict):
    """What the request cost, as the ledger has it."""

    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    pool_tokens: int
    store_tokens: int
    remote_tokens: int
    completion_tokens: int
    reprefill_tokens: int
    bytes_moved: int
    prefill_us: int
    decode_us: int
    microneurons: int
    seams: int


class PromptBlocksObject(TypedDict):
    """Salted hashes at the ends of the prompt's blocks, 16 hex digits each, of the first 256."""

    num_tokens: int
    """Of a block."""
    hashes: str


class TextsObject(TypedDict):
    """The beginnings of prompt and answer, with --explain-texts."""

    prompt: str
    answer: str


class ExplanationObject(RequestRow):
    object: Literal["tandem.explanation"]
    finish_reasons: list[str]
    trace_id: str
    gateway: str
    segments: list[SegmentObject]
    unexplained_ms: float
    phases: list[PhaseObject]
    admission: AdmissionObject | None
    route: RouteObject | None
    moves: list[MoveObject]
    usage: UsageParts
    prompt_blocks: PromptBlocksObject | None
    session: str
    texts: TextsObject | None


class ExplainedObject(TypedDict):
    """What Tandem adds: the explanation with the header `x-tandem-explain: 1`, and seams if the answer has any."""

    explanation: NotRequired[ExplanationObject]
    other_ids: NotRequired[list[str]]
    """Of the request's other prompts."""
    seams: NotRequired[list[SeamObject]]

"""Explains one request that has ended or still runs: the values, and their JSON.

Milliseconds count from the request's head at the gateway. `to_json` gives plain values for `GET /v1/requests` and
`GET /v1/requests/{id}/explain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from control_plane.explain.prompt_blocks import PromptBlocks

State = Literal["queued", "running", "finished", "failed", "cancelled", "aborted"]
SegmentName = Literal[
    "body",
    "text_wait",
    "text",
    "score",
    "limits",
    "queue",
    "route",
    "submit",
    "worker_queue",
    "prefill",
    "transport",
    "detokenize",
    "write",
]
"""The parts of the time to the first token, in the order that a request meets them; also Server-Timing's names."""
ProcessName = Literal["gateway", "text", "prefill", "kv", "decode", "encode"]
PhaseName = Literal["text", "queue", "route", "prefill", "hand_over", "decode", "encode"]
MoveKind = Literal["hand_over", "migration", "restart"]
_DECIMALS = 3
"""Of milliseconds in JSON: whole microseconds."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One row of the list of requests."""

    id: str
    account: str
    model: str
    """The id of the model that answers; "" while no model is known, or if the requested model is unknown."""
    operation: str
    """chat, text_completion, embeddings, rerank, text_classification."""
    state: State
    started_ms: int
    """Unix time."""
    ttft_ms: float | None
    """From the request's head until the first token was handed to the connection; None: there was none."""
    duration_ms: float
    """Until now while the request runs."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill: str = ""
    """The id of the worker that computed the prompt apart from decode; "" if decode did both."""
    decode: str = ""
    error: str = ""
    """The error's class name."""

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens after the first, by the seconds since the first token; None: fewer than two tokens."""
        if self.ttft_ms is None or self.completion_tokens < 2 or self.duration_ms <= self.ttft_ms:
            return None
        return (self.completion_tokens - 1) * 1000.0 / (self.duration_ms - self.ttft_ms)

    def to_json(self) -> dict[str, Any]:
        rate = self.tokens_per_second
        return {
            "id": self.id,
            "account": self.account,
            "model": self.model,
            "operation": self.operation,
            "state": self.state,
            "started_ms": self.started_ms,
            "ttft_ms": _rounded(self.ttft_ms),
            "duration_ms": round(self.duration_ms, _DECIMALS),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_second": None if rate is None else round(rate, 1),
            "prefill": self.prefill,
            "decode": self.decode,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the time to the first token. Segments follow each other without a gap."""

    name: SegmentName
    process: ProcessName
    start_ms: float
    duration_ms: float
    worker: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "process": self.process,
            "worker": self.worker,
            "start_ms": round(self.start_ms, _DECIMALS),
            "duration_ms": round(self.duration_ms, _DECIMALS),
        }


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A part of the whole request, for the waterfall. Phases may overlap."""

    name: PhaseName
    worker: str
    start_ms: float
    duration_ms: float
    num_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "worker": self.worker,
            "start_ms": round(self.start_ms, _DECIMALS),
            "duration_ms": round(self.duration_ms, _DECIMALS),
            "num_tokens": self.num_tokens,
        }


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that the router expected in caches."""

    own: int = 0
    """In the worker's own pool."""
    host: int = 0
    """In the store of the worker's host."""
    remote: int = 0
    """In the store of another host."""

    def to_json(self) -> dict[str, Any]:
        return {"own": self.own, "host": self.host, "remote": self.remote}


@dataclass(frozen=True, slots=True)
class HandOverExplanation:
    """What the router expected of the hand-over from one host to another."""

    from_host: str
    to_host: str
    num_bytes: int
    """To move; what the decode worker has is not moved."""
    fixed_ms: float
    """Of any hand-over between these hosts, learnt or assumed, and what this prompt does not hide of a round trip."""
    transfer_ms: float
    """Of the bytes that are left when prefill samples the first token."""
    wait_ms: float
    """For the arena of the decode worker's host."""
    bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        return {
            "from_host": self.from_host,
            "to_host": self.to_host,
            "num_bytes": self.num_bytes,
            "fixed_ms": round(self.fixed_ms, _DECIMALS),
            "transfer_ms": round(self.transfer_ms, _DECIMALS),
            "wait_ms": round(self.wait_ms, _DECIMALS),
            "bytes_per_second": round(self.bytes_per_second),
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that the router compared, with its estimate."""

    role: Literal["prefill", "decode"]
    worker: str
    predicted_ms: float
    """Until the prompt's KV cache would be there."""
    queue_ms: float
    load_ms: float
    compute_ms: float
    hand_over_ms: float | None = None
    """Of a prefill worker: the expected hand-over, part of `predicted_ms`."""
    cached_tokens: CachedTokens = CachedTokens()
    load: float = 0.0
    """Of a decode worker: the share of its pool's tokens that would be in flight with this request."""
    is_chosen: bool = False
    hand_over: HandOverExplanation | None = None
    """Of a prefill worker: what `hand_over_ms` is made of."""

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "worker": self.worker,
            "predicted_ms": round(self.predicted_ms, _DECIMALS),
            "queue_ms": round(self.queue_ms, _DECIMALS),
            "load_ms": round(self.load_ms, _DECIMALS),
            "compute_ms": round(self.compute_ms, _DECIMALS),
            "hand_over_ms": _rounded(self.hand_over_ms),
            "cached_tokens": self.cached_tokens.to_json(),
            "load": round(self.load, 4),
            "is_chosen": self.is_chosen,
            "hand_over": None if self.hand_over is None else self.hand_over.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to start the request."""

    attempt: int
    prefill: str
    decode: str
    outcome: str
    """`accepted`, or the class name of the error."""

    def to_json(self) -> dict[str, Any]:
        return {"attempt": self.attempt, "prefill": self.prefill, "decode": self.decode, "outcome": self.outcome}


@dataclass(frozen=True, slots=True)
class RouteExplanation:
    """The latest routing decision of the request, with what it was compared to."""

    mode: Literal["handed_over", "local"]
    prefill: str
    """A worker id; "" if the decode worker computed the prompt."""
    decode: str
    reason: str
    predicted_ms: Mapping[str, float] = field(default_factory=dict)
    """By name; of the route chosen: prefill or local, queue, load, compute, hand_over, decode_step."""
    candidates: Sequence[Candidate] = ()
    """At most 8 of each role, those with the fewest predicted milliseconds."""
    runner_up: Candidate | None = None
    """The best candidate, of the role that computes the prompt, that was not chosen."""
    attempts: Sequence[Attempt] = ()

    @property
    def chosen_cached_tokens(self) -> CachedTokens:
        """The prompt tokens that the router expected in the caches of the worker that computes the prompt."""
        role = "prefill" if self.mode == "handed_over" else "decode"
        for candidate in self.candidates:
            if candidate.is_chosen and candidate.role == role:
                return candidate.cached_tokens
        return CachedTokens()

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "prefill": self.prefill,
            "decode": self.decode,
            "reason": self.reason,
            "predicted_ms": {name: round(value, _DECIMALS) for name, value in self.predicted_ms.items()},
            "candidates": [each.to_json() for each in self.candidates],
            "runner_up": None if self.runner_up is None else self.runner_up.to_json(),
            "attempts": [each.to_json() for each in self.attempts],
        }


@dataclass(frozen=True, slots=True)
class GrantExplanation:
    """What a worker's grant left before the request was sent there."""

    number: int
    """Of the grants on the stream to that worker."""
    num_tokens: int
    num_requests: int

    def to_json(self) -> dict[str, Any]:
        return {"number": self.number, "num_tokens": self.num_tokens, "num_requests": self.num_requests}


@dataclass(frozen=True, slots=True)
class AdmissionExplanation:
    """How the request stood among those that waited for its model when it came. Its wait itself is a segment."""

    service_class: str
    """batch, default or priority."""
    predicted_wait_ms: float
    """0: it need not wait behind others, or nothing was known."""
    num_waiting: int
    """For the model, at the gateway."""
    cost_ms: float
    """Predicted device time of prompt and answer."""
    used_ms: float
    """The account's virtual counter for the model: the device time that it has used. Only differences between accounts
    mean something: a counter begins at the least of those that wait."""
    grant: GrantExplanation | None = None
    """Of the decode worker. None: it granted nothing, and the gateway estimated its room."""
    prefill_grant: GrantExplanation | None = None
    """Of the prefill worker; None also if there was none."""
    num_waiting_elsewhere: int = 0
    """For the model, at other gateways, as the workers had told."""

    def to_json(self) -> dict[str, Any]:
        return {
            "service_class": self.service_class,
            "predicted_wait_ms": round(self.predicted_wait_ms, _DECIMALS),
            "num_waiting": self.num_waiting,
            "num_waiting_elsewhere": self.num_waiting_elsewhere,
            "cost_ms": round(self.cost_ms, _DECIMALS),
            "used_ms": round(self.used_ms, _DECIMALS),
            "grant": self.grant.to_json() if self.grant is not None else None,
            "prefill_grant": self.prefill_grant.to_json() if self.prefill_grant is not None else None,
        }


@dataclass(frozen=True, slots=True)
class ClassCrossing:
    """Where the answer goes on with the tokens of another numerics class: they may differ from the class before."""

    position: int
    """Completion tokens before it."""
    from_class: str
    to_class: str

    def to_json(self) -> dict[str, Any]:
        return {"position": self.position, "from_class": self.from_class, "to_class": self.to_class}


@dataclass(frozen=True, slots=True)
class Move:
    """A move of the request between workers, or of its KV cache."""

    kind: MoveKind
    time_ms: float
    from_worker: str
    to_worker: str
    why: str
    """Of a hand-over: "route". Else the class name of the error that the worker was lost to."""
    num_bytes: int = 0
    num_tokens: int = 0
    duration_ms: float = 0.0
    transport: str = ""
    """shm, tcp or grpc; "" if no bytes moved."""
    seam: ClassCrossing | None = None
    """None: the move stays in its numerics class."""

    def to_json(self) -> dict[str, Any]:
        return {
            "time_ms": round(self.time_ms, _DECIMALS),
            "kind": self.kind,
            "from": self.from_worker,
            "to": self.to_worker,
            "why": self.why,
            "num_bytes": self.num_bytes,
            "num_tokens": self.num_tokens,
            "duration_ms": round(self.duration_ms, _DECIMALS),
            "transport": self.transport,
            "seam": None if self.seam is None else self.seam.to_json(),
        }


@dataclass(frozen=True, slots=True)
class UsageExplanation:
    """The cost, as the ledger and the answer's usage have it. `prompt = computed + pool + store + remote`."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    store_tokens: int = 0
    remote_tokens: int = 0
    completion_tokens: int = 0
    reprefill_tokens: int = 0
    bytes_moved: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    microneurons: int = 0
    seams: int = 0
    """Places in the answer where the tokens of another numerics class begin."""

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Texts:
    """What the request said; only with `--explain-texts`."""

    prompt: str
    answer: str

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "answer": self.answer}


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that is known of one request."""

    summary: Summary
    requested_model: str = ""
    """The name that the client sent if it is a name of a served model, else "": for labels of metrics. Not in JSON."""
    finish_reasons: Sequence[str] = ()
    trace_id: str = ""
    gateway: str = ""
    """The incarnation of the gateway that served the request."""
    segments: Sequence[Segment] = ()
    """The critical path of the time to the first token."""
    phases: Sequence[PhaseSpan] = ()
    admission: AdmissionExplanation | None = None
    """None: the request did not come to its workers' queue."""
    route: RouteExplanation | None = None
    moves: Sequence[Move] = ()
    usage: UsageExplanation = UsageExplanation()
    prompt_blocks: PromptBlocks | None = None
    """None: no cache may hold the prompt, or it never came to the dispatcher."""
    session: str = ""
    """A key that only the account's requests with one session id for the model have; "" for no session."""
    texts: Texts | None = None

    @property
    def unexplained_ms(self) -> float:
        """The time to the first token that no segment has; of an encoder's answer, the time to its end; else 0."""
        summary = self.summary
        whole_ms = summary.duration_ms if summary.ttft_ms is None else summary.ttft_ms
        if summary.ttft_ms is None and summary.state != "finished":
            return 0.0
        return whole_ms - sum(segment.duration_ms for segment in self.segments)

    def segment_ms(self, name: SegmentName) -> float:
        """Return the milliseconds of all segments with a name; 0 if there is none."""
        return sum(segment.duration_ms for segment in self.segments if segment.name == name)

    def to_json(self) -> dict[str, Any]:
        return {
            "object": "tandem.explanation",
            **self.summary.to_json(),
            "finish_reasons": list(self.finish_reasons),
            "trace_id": self.trace_id,
            "gateway": self.gateway,
            "segments": [each.to_json() for each in self.segments],
            "unexplained_ms": round(self.unexplained_ms, _DECIMALS),
            "phases": [each.to_json() for each in self.phases],
            "admission": None if self.admission is None else self.admission.to_json(),
            "route": None if self.route is None else self.route.to_json(),
            "moves": [each.to_json() for each in self.moves],
            "usage": self.usage.to_json(),
            "prompt_blocks": None if self.prompt_blocks is None else self.prompt_blocks.to_json(),
            "session": self.session,
            "texts": None if self.texts is None else self.texts.to_json(),
        }


def _rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, _DECIMALS)

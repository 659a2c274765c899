"""Defines the ways in which requests can be answered. Each function answers all requests and fills a journal.

A new way is one more function and one more line in WAYS, with the counter that proves that requests took it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem_engine.messages import AbortRequest, Recompute
from tandem_engine.sampling_params import SamplingParams
from tests.tandem_engine.determinism.hand_over import Pair
from tests.tandem_engine.determinism.request_specs import MAX_ANSWER_TOKENS, RequestSpec, random_tokens
from tests.tandem_engine.determinism.stage import Engine, Stage
from tests.tandem_engine.determinism.store import Store

_MIGRATION_SHARE = 0.08
"""Share of running requests that migrate at each step."""

_PREEMPTED_SHARE = 0.05
"""Share of running requests that is preempted after each step, besides those whose blocks others need."""

_SMALL_BLOCK = 2
"""Tokens per block: answers that need a new block every other token often run out of blocks."""


@dataclass(frozen=True)
class Way:
    name: str
    run: Callable[[Stage, Sequence[RequestSpec]], None]
    proof: str
    """A counter of the journal that is above zero if requests took this way."""


def alone(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """One request after the other, each prompt in one piece, nothing cached."""
    engine = stage.engine(max(map(stage.num_blocks, specs)))
    for spec in specs:
        engine.add(spec)
        engine.drain()
    engine.close()


def in_batches(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    for group in stage.groups(specs, 4, 60):
        engine = stage.roomy(group, max_num_seqs=stage.rng.randint(2, 48))
        engine.run(group)
        engine.close()


def in_chunks(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Prompts are cut by budgets, and cut shorter beside answers."""
    for group in stage.groups(specs, 4, 30):
        engine = stage.roomy(
            group,
            max_num_seqs=stage.rng.randint(1, 16),
            max_num_batched_tokens=stage.rng.choice([1, 3, 17, 32, 50, 100, 256]),
            max_prefill_tokens_with_decodes=stage.rng.choice([1, 16, 64, 256]),
        )
        engine.run(group)
        engine.close()


def two_threads(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    with stage.threads(2):
        in_batches(stage, specs)


def disaggregated(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    before = stage.journal.counters["reprefill_tokens"]
    _hand_over(stage, specs, loss=0.0)
    assert stage.journal.counters["reprefill_tokens"] == before, "decode computed what prefill had"


def through_a_ring(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Prefill's pool is private: decode reads copies in a ring of few slots, often fewer than a prompt has blocks."""
    before = stage.journal.counters["reprefill_tokens"]
    _hand_over(stage, specs, loss=0.0, most_slots=12)
    assert stage.journal.counters["reprefill_tokens"] == before, "decode computed what prefill had"


def disaggregated_with_losses(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Some slabs are lost: decode computes from the first missing block."""
    _hand_over(stage, specs, loss=0.2)


def from_cache(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """The beginnings of prompts are in the pool, from other requests."""
    for group in stage.groups(specs, 4, 30):
        first = [_beginning(stage, spec) for spec in group]
        engine = stage.roomy([*group, *first], max_num_batched_tokens=stage.rng.choice([64, 300, 2048]))
        engine.run(first, caches=True)
        engine.run(group, caches=True)
        engine.close()


def from_store(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Beginnings of prompts come from another process's region; some requests are preempted later."""
    stage = replace(stage, block_size=_SMALL_BLOCK)
    for group in stage.groups(specs, 4, 30):
        first = [_beginning(stage, spec) for spec in group]
        store = Store(stage, 2 * sum(map(stage.num_blocks, (*group, *first))))
        elsewhere = stage.roomy(first, num_slots=stage.rng.choice([None, stage.rng.randint(4, 60)]))
        for spec in first:
            elsewhere.add(spec, caches=True)
        _drain_into(store, elsewhere)
        crowded = _with_crowd(stage, group)
        engine = _tight(stage, crowded)
        store.lend_to(engine)
        for spec in crowded:
            lent = store.prefix(stage.hashes_of(spec.prompt))
            engine.add(spec, caches=True, prefix=lent, priority=stage.rng.choice([0, 1]))
        _drain_into(store, engine)
        elsewhere.close()
        engine.close()


def preempted(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Requests are preempted and computed again, prompt and answer so far in one piece.

    Blocks are too few, but that alone preempts one request of twenty, and none in some runs of fifty.
    """
    stage = replace(stage, block_size=_SMALL_BLOCK)
    for group in stage.groups(specs, 8, 24):
        crowded = _with_crowd(stage, group)
        engine = _tight(stage, crowded)
        caches = stage.rng.random() < 0.5
        for spec in crowded:
            engine.add(spec, caches=caches, priority=stage.rng.choice([0, int(spec not in group)]))
        while engine.has_work:
            engine.step()
            engine.preempt_some(_PREEMPTED_SHARE)
        engine.close()


def migrated(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Engines lose requests at any token; another engine continues, from the tokens alone or after a prefill."""
    for group in stage.groups(specs, 4, 24):
        engines = [stage.roomy(group, f"worker-{number}") for number in range(2)]
        pair = Pair(stage, stage.roomy(group, "prefill"), stage.roomy(group))
        for spec in group:
            engines[0].add(spec)
        while pair.has_work or any(engine.has_work for engine in engines):
            for index, engine in enumerate(engines):
                if engine.has_work:
                    engine.step()
                _migrate(stage, engine, engines[1 - index], pair, group)
            if pair.has_work:
                pair.step()
        for engine in (*engines, pair.prefill, pair.decode):
            engine.close()


def speculating(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Drafts run with answers: from the request's text and from earlier answers."""
    for group in stage.groups(specs, 1, 12):
        most_drafts, most_seqs = stage.rng.randint(1, 8), stage.rng.randint(1, 8)
        engine = stage.roomy(group, max_num_seqs=most_seqs, max_draft_tokens=most_drafts)
        engine.run(group, caches=stage.rng.random() < 0.5)
        engine.close()


def speculating_with_a_model(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """The model is its own draft model, so many drafts are right: in every step and alone, or beside texts."""
    for number, group in enumerate(stage.groups(specs, 1, 12)):
        most_drafts, most_seqs = stage.rng.randint(1, 8), stage.rng.randint(1, 8)
        engine = stage.roomy(group, max_num_seqs=most_seqs, max_draft_tokens=most_drafts)
        is_alone = number % 2 == 0
        engine.use_draft_model(is_alone=is_alone)
        engine.run(group, caches=stage.rng.random() < 0.5)
        if is_alone:
            stage.journal.counters["model_drafts_accepted"] += int(engine.counters["draft_tokens_accepted"])
        engine.close()


def overlapping(stage: Stage, specs: Sequence[RequestSpec]) -> None:
    """Requests arrive and blocks are given while steps run on another thread: in chunks, with drafts, or preempted."""
    roomy = replace(stage, overlaps=True)
    tight = replace(roomy, block_size=_SMALL_BLOCK)
    for number, group in enumerate(stage.groups(specs, 4, 24)):
        match number % 3:
            case 0:
                engine = roomy.roomy(group, max_num_seqs=stage.rng.randint(2, 16), max_num_batched_tokens=100)
            case 1:
                engine = roomy.roomy(group, max_num_seqs=stage.rng.randint(1, 8), max_draft_tokens=4)
                if stage.rng.random() < 0.5:
                    engine.use_draft_model(is_alone=False)
            case _:
                group = _with_crowd(stage, group)
                engine = _tight(tight, group)
        engine.run(group, caches=stage.rng.random() < 0.5)
        engine.close()


WAYS = (
    Way("in batches", in_batches, "shared_steps"),
    Way("in chunks", in_chunks, "chunks"),
    Way("two threads", two_threads, "shared_steps"),
    Way("disaggregated", disaggregated, "bytes_imported"),
    Way("disaggregated, staged in a ring", through_a_ring, "blocks_staged"),
    Way("disaggregated, slabs lost", disaggregated_with_losses, "slabs_lost"),
    Way("from cache", from_cache, "prompt_tokens_cached"),
    Way("from the store", from_store, "prompt_tokens_loaded"),
    Way("preempted", preempted, "requests_preempted"),
    Way("migrated", migrated, "migrations"),
    Way("speculating", speculating, "draft_tokens_accepted"),
    Way("speculating with a draft model", speculating_with_a_model, "model_drafts_accepted"),
    Way("overlapping", overlapping, "added_while_a_step_runs"),
)
ALONE = Way("alone", alone, "steps")


def _hand_over(stage: Stage, specs: Sequence[RequestSpec], loss: float, most_slots: int | None = None) -> None:
    for group in stage.groups(specs, 2, 30):
        num_slots = None if most_slots is None else stage.rng.randint(1, most_slots)
        most_tokens = stage.rng.choice([40, 200, 2048])
        prefill = stage.roomy(group, "prefill", num_slots, max_num_batched_tokens=most_tokens)
        pair = Pair(stage, prefill, stage.roomy(group), loss)
        for spec in group:
            pair.add(spec)
        while pair.has_work:
            pair.step()
        pair.prefill.close()
        pair.decode.close()


def _tight(stage: Stage, specs: Sequence[RequestSpec]) -> Engine:
    """Return an engine with blocks for the largest request, and few more."""
    most = max(map(stage.num_blocks, specs))
    num_blocks = most + stage.rng.randint(0, most // 2)
    return stage.engine(num_blocks, max_num_seqs=16, max_num_batched_tokens=200, max_prefill_tokens_with_decodes=200)


def _with_crowd(stage: Stage, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """Return the requests among others with short prompts, admitted at once, whose answers then need many blocks."""
    crowd = [
        RequestSpec(f"crowd-{number}", _random_prompt(stage, 6), SamplingParams(MAX_ANSWER_TOKENS))
        for number in range(2 * len(specs))
    ]
    return stage.rng.sample([*specs, *crowd], 3 * len(specs))


def _random_prompt(stage: Stage, most: int) -> tuple[int, ...]:
    return random_tokens(stage.rng, stage.rng.randint(1, most), stage.model.info.vocab_size)


def _beginning(stage: Stage, spec: RequestSpec) -> RequestSpec:
    """Return another request whose prompt begins like this one's."""
    num_shared = stage.rng.randint(0, len(spec.prompt))
    max_tokens = stage.rng.randint(1, 4)
    prompt = spec.prompt[:num_shared] + _random_prompt(stage, stage.block_size)
    return RequestSpec(f"before-{spec.request_id}", prompt, SamplingParams(max_tokens))


def _drain_into(store: Store, engine: Engine) -> None:
    """Step to the end; the store keeps the blocks that are filled."""
    while engine.has_work:
        done, _ = engine.step()
        for filled in done.filled:
            store.keep(engine, filled)


def _migrate(stage: Stage, here: Engine, there: Engine, pair: Pair, specs: Sequence[RequestSpec]) -> None:
    """Abort some requests and continue them on other engines."""
    for spec in specs:
        if spec.request_id not in here.live or stage.rng.random() > _MIGRATION_SHARE:
            continue
        here.core.handle(AbortRequest(spec.request_id))
        here.live.discard(spec.request_id)
        stage.journal.counters["migrations"] += 1
        answer = stage.journal.answer(spec.request_id, len(spec.prompt))
        match stage.rng.choice(["aggregated", "recomputed", "handed over"]):
            case "aggregated":
                there.add(spec, answer)
            case "recomputed":
                there.add(spec, answer, "decode")
                there.core.handle(Recompute(spec.request_id))
            case "handed over":
                pair.add(spec, answer)

"""Defines the ways in which requests can be answered. Each function answers all requests and fills a journal.

A new way is one more function and one more line in WAYS, with the counter that proves that requests took it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem_engine.messages import AbortRequest, Recompute
from tandem_engine.scheduling.sampling_params import SamplingParams
from tests.tandem_engine.determinism.asks import MAX_ANSWER_TOKENS, Ask, random_tokens
from tests.tandem_engine.determinism.hand_over import Pair
from tests.tandem_engine.determinism.stage import Engine, Stage
from tests.tandem_engine.determinism.store import Store

_MIGRATION_SHARE = 0.08
"""Of running requests, at each step."""

_SMALL_BLOCK = 2
"""Tokens; answers that need a new block every other token run out of them often."""


@dataclass(frozen=True)
class Way:
    name: str
    play: Callable[[Stage, Sequence[Ask]], None]
    proof: str
    """A counter of the journal that is above zero if requests took this way."""


def alone(stage: Stage, asks: Sequence[Ask]) -> None:
    """One after the other, each prompt in one piece, nothing cached."""
    engine = stage.engine(max(map(stage.num_blocks, asks)))
    for ask in asks:
        engine.add(ask)
        engine.drain()
    engine.close()


def in_batches(stage: Stage, asks: Sequence[Ask]) -> None:
    for group in stage.groups(asks, 4, 60):
        engine = stage.roomy(group, max_num_seqs=stage.chance.randint(2, 48))
        engine.play(group)
        engine.close()


def in_chunks(stage: Stage, asks: Sequence[Ask]) -> None:
    """Prompts are cut by budgets, and cut shorter beside answers."""
    for group in stage.groups(asks, 4, 30):
        engine = stage.roomy(
            group,
            max_num_seqs=stage.chance.randint(1, 16),
            max_num_batched_tokens=stage.chance.choice([1, 3, 17, 32, 50, 100, 256]),
            max_prefill_tokens_with_decodes=stage.chance.choice([1, 16, 64, 256]),
        )
        engine.play(group)
        engine.close()


def two_threads(stage: Stage, asks: Sequence[Ask]) -> None:
    with stage.threads(2):
        in_batches(stage, asks)


def disaggregated(stage: Stage, asks: Sequence[Ask]) -> None:
    before = stage.journal.counters["reprefill_tokens"]
    _hand_over(stage, asks, loss=0.0)
    assert stage.journal.counters["reprefill_tokens"] == before, "decode computed what prefill had"


def disaggregated_with_losses(stage: Stage, asks: Sequence[Ask]) -> None:
    """Some slabs never come: decode computes from the first missing block on."""
    _hand_over(stage, asks, loss=0.2)


def from_cache(stage: Stage, asks: Sequence[Ask]) -> None:
    """The beginnings of prompts lie in the pool, left by other requests."""
    for group in stage.groups(asks, 4, 30):
        first = [_beginning(stage, ask) for ask in group]
        engine = stage.roomy([*group, *first], max_num_batched_tokens=stage.chance.choice([64, 300, 2048]))
        engine.play(first, caches=True)
        engine.play(group, caches=True)
        engine.close()


def from_store(stage: Stage, asks: Sequence[Ask]) -> None:
    """Beginnings of prompts come from another process's region; some requests are preempted later."""
    stage = replace(stage, block_size=_SMALL_BLOCK)
    for group in stage.groups(asks, 4, 30):
        first = [_beginning(stage, ask) for ask in group]
        store = Store(stage, 2 * sum(map(stage.num_blocks, (*group, *first))))
        elsewhere = stage.roomy(first)
        for ask in first:
            elsewhere.add(ask, caches=True)
        _drain_into(store, elsewhere)
        crowded = _with_crowd(stage, group)
        engine = _tight(stage, crowded)
        store.lend_to(engine)
        for ask in crowded:
            lent = store.prefix(stage.hashes_of(ask.prompt))
            engine.add(ask, caches=True, prefix=lent, priority=stage.chance.choice([0, 1]))
        _drain_into(store, engine)
        elsewhere.close()
        engine.close()


def preempted(stage: Stage, asks: Sequence[Ask]) -> None:
    """Too few blocks: answers lose theirs and are computed again, prompt and answer so far in one piece."""
    stage = replace(stage, block_size=_SMALL_BLOCK)
    for group in stage.groups(asks, 8, 24):
        crowded = _with_crowd(stage, group)
        engine = _tight(stage, crowded)
        caches = stage.chance.random() < 0.5
        for ask in crowded:
            engine.add(ask, caches=caches, priority=stage.chance.choice([0, int(ask not in group)]))
        engine.drain()
        engine.close()


def migrated(stage: Stage, asks: Sequence[Ask]) -> None:
    """Engines lose requests at any token; another goes on, from the tokens alone or by another prefill."""
    for group in stage.groups(asks, 4, 24):
        engines = [stage.roomy(group, f"worker-{number}") for number in range(2)]
        pair = Pair(stage, stage.roomy(group, "prefill"), stage.roomy(group))
        for ask in group:
            engines[0].add(ask)
        while pair.has_work or any(engine.has_work for engine in engines):
            for index, engine in enumerate(engines):
                if engine.has_work:
                    engine.step()
                _migrate(stage, engine, engines[1 - index], pair, group)
            if pair.has_work:
                pair.step()
        for engine in (*engines, pair.prefill, pair.decode):
            engine.close()


def speculating(stage: Stage, asks: Sequence[Ask]) -> None:
    """Drafts run with answers: from the request's text and from earlier answers."""
    for group in stage.groups(asks, 1, 12):
        most_drafts, most_seqs = stage.chance.randint(1, 8), stage.chance.randint(1, 8)
        engine = stage.roomy(group, max_num_seqs=most_seqs, max_draft_tokens=most_drafts)
        engine.play(group, caches=stage.chance.random() < 0.5)
        engine.close()


def speculating_with_a_model(stage: Stage, asks: Sequence[Ask]) -> None:
    """The model is its own draft model, so many drafts are right: in every step and alone, or beside texts."""
    for number, group in enumerate(stage.groups(asks, 1, 12)):
        most_drafts, most_seqs = stage.chance.randint(1, 8), stage.chance.randint(1, 8)
        engine = stage.roomy(group, max_num_seqs=most_seqs, max_draft_tokens=most_drafts)
        is_alone = number % 2 == 0
        engine.use_draft_model(is_alone=is_alone)
        engine.play(group, caches=stage.chance.random() < 0.5)
        if is_alone:
            stage.journal.counters["model_drafts_accepted"] += int(engine.counters["draft_tokens_accepted"])
        engine.close()


WAYS = (
    Way("in batches", in_batches, "shared_steps"),
    Way("in chunks", in_chunks, "chunks"),
    Way("two threads", two_threads, "shared_steps"),
    Way("disaggregated", disaggregated, "bytes_imported"),
    Way("disaggregated, slabs lost", disaggregated_with_losses, "slabs_lost"),
    Way("from cache", from_cache, "prompt_tokens_cached"),
    Way("from the store", from_store, "prompt_tokens_loaded"),
    Way("preempted", preempted, "requests_preempted"),
    Way("migrated", migrated, "migrations"),
    Way("speculating", speculating, "draft_tokens_accepted"),
    Way("speculating with a draft model", speculating_with_a_model, "model_drafts_accepted"),
)
ALONE = Way("alone", alone, "steps")


def _hand_over(stage: Stage, asks: Sequence[Ask], loss: float) -> None:
    for group in stage.groups(asks, 2, 30):
        prefill = stage.roomy(group, "prefill", max_num_batched_tokens=stage.chance.choice([40, 200, 2048]))
        pair = Pair(stage, prefill, stage.roomy(group), loss)
        for ask in group:
            pair.add(ask)
        while pair.has_work:
            pair.step()
        pair.prefill.close()
        pair.decode.close()


def _tight(stage: Stage, asks: Sequence[Ask]) -> Engine:
    """Return an engine with room for the largest of them, and little more."""
    most = max(map(stage.num_blocks, asks))
    num_blocks = most + stage.chance.randint(0, most // 2)
    return stage.engine(num_blocks, max_num_seqs=16, max_num_batched_tokens=200, max_prefill_tokens_with_decodes=200)


def _with_crowd(stage: Stage, asks: Sequence[Ask]) -> list[Ask]:
    """Return them among others whose short prompts are let in at once and whose answers then need many blocks."""
    crowd = [
        Ask(f"crowd-{number}", _random_prompt(stage, 6), SamplingParams(MAX_ANSWER_TOKENS))
        for number in range(2 * len(asks))
    ]
    return stage.chance.sample([*asks, *crowd], 3 * len(asks))


def _random_prompt(stage: Stage, most: int) -> tuple[int, ...]:
    return random_tokens(stage.chance, stage.chance.randint(1, most), stage.model.info.vocab_size)


def _beginning(stage: Stage, ask: Ask) -> Ask:
    """Return another request whose prompt begins like this one's."""
    num_shared = stage.chance.randint(0, len(ask.prompt))
    max_tokens = stage.chance.randint(1, 4)
    prompt = ask.prompt[:num_shared] + _random_prompt(stage, stage.block_size)
    return Ask(f"before-{ask.request_id}", prompt, SamplingParams(max_tokens))


def _drain_into(store: Store, engine: Engine) -> None:
    """Step to the end; the store keeps the blocks that are filled."""
    while engine.has_work:
        done, _ = engine.step()
        for filled in done.filled:
            store.keep(engine, filled)


def _migrate(stage: Stage, here: Engine, there: Engine, pair: Pair, asks: Sequence[Ask]) -> None:
    """Take some requests away and let others go on with them."""
    for ask in asks:
        if ask.request_id not in here.live or stage.chance.random() > _MIGRATION_SHARE:
            continue
        here.core.handle(AbortRequest(ask.request_id))
        here.live.discard(ask.request_id)
        stage.journal.counters["migrations"] += 1
        answer = stage.journal.answer(ask.request_id, len(ask.prompt))
        match stage.chance.choice(["aggregated", "recomputed", "handed over"]):
            case "aggregated":
                there.add(ask, answer)
            case "recomputed":
                there.add(ask, answer, "decode")
                there.core.handle(Recompute(ask.request_id))
            case "handed over":
                pair.add(ask, answer)

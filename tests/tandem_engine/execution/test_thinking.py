"""A grammar begins after the thinking, and the thinking ends in time: alone, with drafts, on another engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem_engine.assembly import AssembledEngine
from tandem_engine.execution.grammar.thought import Thought, only, with_token
from tandem_engine.grammar import Grammar
from tandem_engine.messages import AddRequest
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.thinking import MAX_MARK_TOKENS, Thinking
from tests.tandem_engine.execution.test_grammar import drained, tokenizer_of
from tests.tandem_engine.execution.test_speculation import Oracle

MakeEngine = Callable[..., AssembledEngine]
PROMPT = [5, 6, 7]
WORD = Grammar("regex", "[a-z]{4}")
START, END = 40, 41


def _sampling(engine: AssembledEngine, thinking: Thinking, **changes: Any) -> SamplingParams:
    values: dict[str, Any] = {"temperature": 1.5, "stop_token_ids": tuple(engine.ready.model.eos_token_ids), **changes}
    return SamplingParams(**{"max_tokens": 96, "grammar": WORD, "thinking": thinking, **values})


def _answers(engine: AssembledEngine, asks: dict[str, SamplingParams]) -> dict[str, list[int]]:
    for name, sampling in asks.items():
        engine.core.handle(AddRequest(name, PROMPT, len(PROMPT), sampling))
    found: dict[str, list[int]] = {name: [] for name in asks}
    for output in drained(engine.core):
        found[output.request_id] += output.token_ids
    return found


# ------------------------------------------------------------------------------------------------ the place in it


@pytest.mark.parametrize("seed", range(40))
def test_the_end_is_where_the_tokens_of_the_end_first_are(seed: int) -> None:
    """Two letters, so that ends begin again within themselves; pieces cut anywhere."""
    chance = random.Random(seed)
    end = tuple(chance.choices((1, 2), k=chance.randint(1, 5)))
    answer = chance.choices((1, 2), k=60)
    places = [n for n in range(len(end), len(answer) + 1) if tuple(answer[n - len(end) : n]) == end]
    thought = Thought(Thinking(end))
    rest = list(answer)
    while rest:
        num_taken = chance.randint(1, 7)
        thought.follow(rest[:num_taken])
        rest = rest[num_taken:]
    assert thought.is_over == bool(places)
    assert thought.num_tokens == (places[0] if places else len(answer))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_forced_ends_it_at_once(seed: int) -> None:
    chance = random.Random(seed)
    end = tuple(chance.choices((1, 2), k=chance.randint(1, 5)))
    most = chance.randint(0, 12)
    thought, answer = Thought(Thinking(end, max_tokens=most)), list[int]()
    while not thought.is_over:
        token_id = thought.forced_token_id or chance.choice((1, 2, 3))
        assert (thought.forced_token_id is not None) == (len(answer) >= most)
        answer.append(token_id)
        thought.follow([token_id])
    assert tuple(answer[-len(end) :]) == end and len(answer) <= most + len(end)


def test_rows_end_where_the_thinking_does() -> None:
    thought = Thought(Thinking((END,), (), START))
    assert thought.rows([]) == ([None], None)
    assert thought.rows([7, 8]) == ([None], 1), "another first token: no thinking"
    assert thought.rows([START, 7, END, 8, 9]) == ([None, None, None], 3)
    thought.follow([START])
    assert thought.rows([7, 8]) == ([None, None, None], None) and not thought.is_over


def test_rows_force_the_end_and_stop_where_a_draft_differs() -> None:
    thought = Thought(Thinking((END, START), max_tokens=1))
    allowed, num_drafts = thought.rows([7, END, START, 9])
    assert num_drafts == 3
    assert [None if each is None else each.tolist() for each in allowed] == [
        None,
        only(END).tolist(),
        only(START).tolist(),
    ]
    allowed, num_drafts = thought.rows([7, 8, 9])
    assert num_drafts is None and len(allowed) == 2


def test_what_is_forced_may_close_more_than_the_thinking() -> None:
    """As gpt-oss does: end of the message, start of the next one, its channel."""
    thought = Thought(Thinking((4, 5), (1, 2, 4, 5), max_tokens=3))
    thought.follow([9, 9])
    assert thought.forced_token_id is None
    for before, forced in ((9, 1), (1, 2), (2, 4), (4, 5)):
        thought.follow([before])
        assert thought.forced_token_id == forced
    thought.follow([5])
    assert thought.is_over and thought.num_tokens == 7
    at_once = Thought(Thinking((4, 5), (1, 2, 4, 5), max_tokens=0))
    assert at_once.forced_token_id == 4
    begun = Thought(Thinking((4, 5), (1, 2, 4, 5), max_tokens=2))
    begun.follow([9, 1])
    assert begun.forced_token_id == 2, "the model has begun to close it"


def test_a_mask_with_one_token_more_has_the_others_too() -> None:
    assert with_token(only(3), 70).tolist() == [8, 0, 64] and with_token(only(70), 3).tolist() == [8, 0, 64]
    assert with_token(only(31), 31).tolist() == only(31).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"end_token_ids": ()},
        {"end_token_ids": (1,) * (MAX_MARK_TOKENS + 1)},
        {"max_tokens": -1},
        {"forced_token_ids": (2,)},
        {"forced_token_ids": (1,) * (MAX_MARK_TOKENS + 1)},
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"thinking\.{next(iter(wrong))}"):
        Thinking(**{"end_token_ids": (1,), **wrong})


# ------------------------------------------------------------------------------------------------ in the engine


def test_the_grammar_begins_after_the_thinking(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    inside = Thinking((END,), max_tokens=20)
    asks = {str(seed): _sampling(engine, inside, seed=seed) for seed in range(6)}
    for answer in _answers(engine, asks).values():
        end = answer.index(END)
        text = tokenizer_of(engine).decode(answer[end + 1 :])
        assert end <= 20 and len(text) == 4 and text.islower(), (answer, text)


def test_an_answer_that_does_not_begin_to_think_follows_the_grammar_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    may = Thinking((END,), (), START, max_tokens=5)
    never = _sampling(engine, may, logit_bias={START: -100.0})
    always = _sampling(engine, may, logit_bias={START: 100.0, END: -100.0})
    found = _answers(engine, {"never": never, "always": always})
    decode = tokenizer_of(engine).decode
    assert START not in found["never"] and len(decode(found["never"])) == 4
    assert found["always"][0] == START and found["always"].index(END) == 6, "five tokens, then the end, forced"
    assert len(decode(found["always"][7:])) == 4


def test_thinking_is_limited_without_a_grammar_too(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    end = (START, END)
    limited = _sampling(engine, Thinking(end, max_tokens=8), grammar=None, max_tokens=30, logit_bias={END: -50.0})
    [answer] = _answers(engine, {"a": limited}).values()
    place = next(n for n in range(len(answer)) if tuple(answer[n : n + 2]) == end)
    assert place <= 8 and len(answer) == 30


def test_a_limit_of_nothing_forces_the_end_first(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    [answer] = _answers(engine, {"a": _sampling(engine, Thinking((END,), max_tokens=0))}).values()
    assert answer[0] == END and len(tokenizer_of(engine).decode(answer[1:])) == 4


@pytest.mark.parametrize("start", [None, START])
def test_drafts_change_no_token(start: int | None, make_engine: MakeEngine) -> None:
    settings = {"block_size": 4, "num_kv_blocks": 512, "max_num_batched_tokens": 256}
    plain, drafted = (make_engine("llama", speculation=each, **settings) for each in ("off", "auto"))
    bias = {} if start is None else {start: 6.0}
    asks = {
        f"{seed} {grammar is None}": _sampling(
            plain,
            Thinking((END,), (), start, max_tokens=12),
            seed=seed,
            grammar=grammar,
            logit_bias=bias,
            max_tokens=24,
        )
        for seed in range(12)
        for grammar in (WORD, None, Grammar("regex", "[a-z ]{12,16}"))
    }
    expected = _answers(plain, asks)
    drafted.core.scheduler.speculator.use([Oracle(expected)])
    assert _answers(drafted, asks) == expected
    assert drafted.core.scheduler.stats().counters["draft_tokens_accepted"] > 20


def test_an_answer_goes_on_from_any_token_in_another_engine(make_engine: MakeEngine) -> None:
    first, second = make_engine("llama", max_num_seqs=1), make_engine("llama", num_kv_blocks=512)
    sampling = _sampling(first, Thinking((END,), (), START, max_tokens=9), seed=3, logit_bias={START: 50.0})
    [whole] = _answers(first, {"a": sampling}).values()
    rests: dict[int, list[int]] = {length: [] for length in range(1, len(whole))}
    for length in rests:
        second.core.handle(AddRequest(str(length), [*PROMPT, *whole[:length]], len(PROMPT), sampling))
    for output in drained(second.core):
        rests[int(output.request_id)] += output.token_ids
    assert whole[0] == START and all(whole[length:] == rest for length, rest in rests.items())

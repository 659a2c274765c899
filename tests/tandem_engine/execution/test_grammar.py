"""Tests that an answer follows its grammar, in every mode and with every other parameter."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem_engine import assembly
from tandem_engine.assembly import AssembledEngine
from tandem_engine.core import EngineCore
from tandem_engine.execution.grammar.guided import Guide
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.grammar.matcher import GrammarFailed, MakeMatcher, Matcher
from tandem_engine.grammar import Grammar
from tandem_engine.messages import AddRequest, RequestOutput
from tandem_engine.ops.sampling import Words
from tandem_engine.sampling_params import SamplingParams
from tests.tandem_engine.schemas import random_schema

MakeEngine = Callable[..., AssembledEngine]
NUM_SCHEMAS = int(os.environ.get("TANDEM_NUM_SCHEMAS", "40"))
"""Of each model; 250 in the full form."""
WORD = Grammar("regex", "[a-z]{4}")


def tokenizer_of(engine: AssembledEngine) -> Any:
    return Tokenizer.from_file(engine.ready.model.asset_paths["tokenizer.json"])


def params(engine: AssembledEngine, grammar: Grammar, max_tokens: int = 64, **changes: Any) -> SamplingParams:
    ends = tuple(engine.ready.model.eos_token_ids)
    values: dict[str, Any] = {"temperature": 1.5, "stop_token_ids": ends, **changes}
    return SamplingParams(max_tokens, grammar=grammar, **values)


def answers(engine: AssembledEngine, asks: dict[str, SamplingParams]) -> dict[str, tuple[str, str | None]]:
    """Answer all side by side; return text and finish reason of each."""
    for name, sampling in asks.items():
        engine.core.handle(AddRequest(name, [5, 6, 7], 3, sampling))
    outputs = drained(engine.core)
    tokenizer = tokenizer_of(engine)
    found: dict[str, tuple[str, str | None]] = {}
    for name in asks:
        own = [output for output in outputs if output.request_id == name]
        found[name] = (tokenizer.decode([token for each in own for token in each.token_ids]), own[-1].finish_reason)
    return found


def drained(core: EngineCore) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while core.has_work():
        outputs += core.step().outputs
        assert not core.take_failures()
    return outputs


@pytest.mark.parametrize("kind", ["demo", "llama"])
def test_every_answer_ends_by_itself_and_validates(kind: str, make_engine: MakeEngine) -> None:
    """Holds for any weights; `llama` has random ones."""
    engine = make_engine(
        kind, num_kv_blocks=1024, max_num_batched_tokens=256, max_num_waiting=NUM_SCHEMAS, block_size=16
    )
    chance = random.Random(20)
    schemas = {f"{number}": random_schema(chance) for number in range(NUM_SCHEMAS)}
    asks = {
        name: params(engine, Grammar("json_schema", json.dumps(schema)), 400, seed=int(name))
        for name, schema in schemas.items()
    }
    for name, (text, finish_reason) in answers(engine, asks).items():
        assert finish_reason == "stop", (schemas[name], text)
        validator = jsonschema_rs.validator_for(schemas[name], validate_formats=True)
        problems = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not problems, (schemas[name], text)


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Grammar("json_object"), lambda text: isinstance(json.loads(text), dict)),
        (Grammar("regex", "(yes|no){1,3}"), lambda text: text.replace("yes", "").replace("no", "") == ""),
        (Grammar("lark", 'start: "Dear " name\nname: "Ann" | "Bob"'), lambda text: text in ("Dear Ann", "Dear Bob")),
    ],
)
def test_each_kind_of_grammar_holds(grammar: Grammar, fits: Callable[[str], bool], make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    asks = {str(seed): params(engine, grammar, 400, seed=seed, temperature=1.0) for seed in range(4)}
    found = answers(engine, asks)
    complete = [text for text, finish_reason in found.values() if finish_reason == "stop"]
    assert complete and all(map(fits, complete))


def test_an_answer_goes_on_from_any_token_in_another_engine(make_engine: MakeEngine) -> None:
    first, second = make_engine("llama", max_num_seqs=1), make_engine("llama")
    schema = '{"type":"array","items":{"enum":["a","bc",17,null]},"minItems":4,"maxItems":9}'
    sampling = params(first, Grammar("json_schema", schema), seed=3)
    first.core.handle(AddRequest("a", [5, 6, 7], 3, sampling))
    whole = [token for output in drained(first.core) for token in output.token_ids]
    for length in range(1, len(whole)):
        second.core.handle(AddRequest(str(length), [5, 6, 7, *whole[:length]], 3, sampling))
    rests: dict[str, list[int]] = {str(length): [] for length in range(1, len(whole))}
    for output in drained(second.core):
        rests[output.request_id] += output.token_ids
    assert all(whole[int(length) :] == rest for length, rest in rests.items())


def test_an_answer_that_is_complete_ends_although_it_should_be_longer(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    plus = Grammar("regex", "[a-z]{4,}")
    asks = {"full": params(engine, WORD, min_tokens=50), "longer": params(engine, plus, min_tokens=50)}
    found = answers(engine, asks)
    assert len(found["full"][0]) == 4 and found["full"][1] == "stop"
    assert len(found["longer"][0]) >= 50


def test_bias_and_penalties_never_break_a_grammar(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    no_token = dict.fromkeys(range(320), -100.0)
    sampling = params(
        engine, WORD, logit_bias=no_token, repetition_penalty=50.0, frequency_penalty=2.0, top_k=1, top_p=0.1, min_p=0.9
    )
    text, finish_reason = answers(engine, {"a": sampling})["a"]
    assert len(text) == 4 and text.islower() and finish_reason == "stop"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("lark", "start: foo"), "unknown name"),
        (Grammar("json_schema", '{"not": {}}'), "Unimplemented keys"),
        (Grammar("json_schema", "[]"), "cannot be read"),
        (Grammar("regex", "(a{1000}){1000}"), "too many expressions"),
    ],
)
def test_a_grammar_that_cannot_be_used_fails_its_request_and_no_other(
    grammar: Grammar, words: str, make_engine: MakeEngine
) -> None:
    engine = make_engine("llama")
    engine.core.handle(AddRequest("bad", [5, 6, 7], 3, params(engine, grammar)))
    engine.core.handle(AddRequest("good", [5, 6, 7], 3, params(engine, WORD)))
    failures, outputs = [], []
    while engine.core.has_work():
        outputs += engine.core.step().outputs
        failures += engine.core.take_failures()
    assert [failure.request_id for failure in failures] == ["bad"]
    assert words in failures[0].message and failures[0].is_callers_fault
    assert [output.finish_reason for output in outputs if output.request_id == "good"][-1] == "stop"
    stats = engine.core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks


def test_answers_go_on_while_a_grammar_is_compiled(make_engine: MakeEngine) -> None:
    plain, engine = make_engine("llama"), make_engine("llama")
    expected = answers(plain, {"bound": params(plain, WORD, seed=4)})
    runner: Any = engine.core.runner
    may_go_on = threading.Event()

    def compile_late(grammar: Grammar) -> MakeMatcher:
        assert may_go_on.wait(20)
        return assembly._guide(engine.ready.model, runner._ops)(grammar)

    runner._masks = GrammarMasks(lambda: compile_late)
    engine.core.handle(AddRequest("free", [5, 6, 7], 3, SamplingParams(30)))
    engine.core.step()
    engine.core.handle(AddRequest("bound", [5, 6, 7], 3, params(engine, WORD, seed=4)))
    outputs = [output for _ in range(10) for output in engine.core.step().outputs]
    assert [output.request_id for output in outputs] == ["free"] * 10
    may_go_on.set()
    tokens = [token for output in drained(engine.core) if output.request_id == "bound" for token in output.token_ids]
    assert tokenizer_of(engine).decode(tokens) == expected["bound"][0]


def masks(matcher: Matcher, new_tokens: list[int], drafts: Sequence[int] = ()) -> Sequence[Words]:
    matcher.request_masks(new_tokens, drafts)
    return matcher.masks()


def test_a_grammar_that_no_token_follows_fails(tmp_path: Path) -> None:
    """The vocabulary has only two words."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "ab": 2, "cd": 3}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    guide = Guide(tmp_path / "tokenizer.json", 4, [1])
    matcher = guide(Grammar("regex", "(ab|cd)*(zz|yy)"))()
    assert [mask.tolist() for mask in masks(matcher, [2], [3, 2])] == [[0b1100]] * 3
    with pytest.raises(GrammarFailed, match="no continuation"):
        masks(guide(Grammar("regex", "(ab|cd)(zz|yy)"))(), [2])
    ends = guide(Grammar("regex", "(ab|cd)+"))()
    assert [mask.tolist() for mask in masks(ends, [], [3])] == [[0b1100], [0b1110]]


def test_a_draft_that_was_wrong_leaves_nothing_in_later_masks(tmp_path: Path) -> None:
    """The same words follow both first letters; what follows these words depends on the first letter."""
    words = ["<s>", "</s>", "a", "b", "c", "x", "y", "cx", "cy"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    make = Guide(tmp_path / "tokenizer.json", len(words), [1])(
        Grammar("lark", 'start: "a" M "x" | "b" M "y"\nM: /c|d/')
    )
    drafted, plain = make(), make()
    a, b = words.index("a"), words.index("b")
    allowed = [mask.tolist() for mask in masks(drafted, [], [a])]
    assert allowed == [[1 << a | 1 << b], [1 << words.index("c") | 1 << words.index("cx")]]
    assert [mask.tolist() for mask in masks(drafted, [b])] == [mask.tolist() for mask in masks(plain, [b])]


def test_a_matcher_lives_no_longer_than_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    answers(engine, {str(seed): params(engine, WORD, seed=seed) for seed in range(5)})
    answers(engine, {"last": params(engine, WORD)})
    gc.collect()
    runner: Any = engine.core.runner
    assert len(runner._masks._places) <= 1  # that of the last step

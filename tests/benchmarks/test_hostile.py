"""A gateway lives through every kind of hostile request: all are answered, nobody else loses a stream."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.hostile.__main__ import Size, measure_parts
from benchmarks.hostile.exchange import Answer, Script, exchange, request
from benchmarks.hostile.kinds import KINDS
from benchmarks.hostile.maker import Kind, Maker
from benchmarks.hostile.results import Crowded, Lag, Quiet, Results, Seen, enter
from benchmarks.hostile.vocabulary import write_model
from benchmarks.lib.command import Outcome

_TINY = Size(
    num_streams=8,
    max_body_bytes=20_000,
    quiet_seconds=0.3,
    kind_seconds=0.0,
    settle_seconds=0.0,
    give_up_seconds=20.0,
    kinds_per_quiet=100,
    num_vocabulary_tokens=1500,
    num_long_rounds=1,
    num_half_heads=10,
    num_slow_bodies=5,
    num_workers=10,
    crowd_seconds=1.0,
)


_COUNTS = ("unanswered", "streams_ended", "honest_failed")


def _maker() -> Maker:
    return Maker("token", "model", "large", "account", 20_000)


async def test_a_gateway_answers_every_kind_of_hostile_request_and_nobody_else_notices(tmp_path: Path) -> None:
    """Bodies of 20 kB, sixteen at once. `python -m benchmarks.hostile` has large ones, bad connections and figures."""
    outcome, kinds = Outcome(), [kind for kind in KINDS.values() if kind.part == "bodies"]
    assert len(kinds) >= 40
    await measure_parts(outcome, _TINY, tmp_path / "world", lambda line: None, ["together"], kinds)
    counts = {name: outcome.figures[f"sixteen_at_once.num_{name}"] for name in _COUNTS}
    assert counts == dict.fromkeys(_COUNTS, 0)
    assert outcome.figures["sixteen_at_once.num_answers"] >= len(kinds) - 1


def test_there_are_at_least_forty_kinds_of_bounded_size_and_the_same_bytes_each_time() -> None:
    assert len(KINDS) >= 40
    for kind in KINDS.values():
        first, second = kind.make(_maker()), kind.make(_maker())
        assert first == second, kind.name
        assert 0 < len(first) <= 200
        assert sum(script.num_bytes for script in first) < 4_000_000, kind.name


def test_a_generated_vocabulary_is_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_model(tmp_path / "model", 1500)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert (
        tokenizer.get_vocab_size() == 1500 == json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    )
    text = "hello wörld " + "".join(map(chr, random.Random(1).choices(range(32, 1000), k=50)))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


_ANSWERED = Answer(200, False, 1.0, 1.0)
_REFUSED = Answer(400, False, 2.0, 2.5)
_KIND = Kind("a kind", lambda maker: [])
_HEADS = Kind("heads", lambda maker: [], limit_seconds=10.0)


def _seen(kind: Kind = _KIND, *answers: Answer, p99: float = 0.06, longest: float = 0.07, num_ended: int = 0) -> Seen:
    return Seen(kind, 1000, answers or (_ANSWERED,), p99, longest, 1_000_000, num_ended)


def _missed(results: Results) -> list[str]:
    outcome = Outcome()
    enter(outcome, results)
    return [target.text for target in outcome.targets if not target.is_met]


def _results(*kinds: Seen) -> Results:
    return Results(quiet=[Quiet(0.05, 0.06), Quiet(0.06, 0.08)], kinds=list(kinds))


def test_a_gateway_that_nothing_stops_meets_every_target() -> None:
    closed_in_time = Answer(None, True, 11.0, 12.0)
    assert _missed(_results(_seen(), _seen(_KIND, _REFUSED), _seen(_HEADS, closed_in_time))) == []


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (_seen(p99=0.2), "one at a time: p99 gap +145 ms, +50 wanted"),
        (_seen(longest=0.4), "one at a time: longest gap +320 ms, +150 wanted"),
        (_seen(num_ended=1), "1 of the others' streams ended, 0 wanted"),
        (_seen(_KIND, Answer(400, False, 4.0, 4.0)), "refused within 4.0 s (a kind), 3 wanted"),
        (_seen(_HEADS, Answer(None, True, 14.0, 14.0)), "refused within 4.0 s (heads), 3 wanted"),
        (_seen(_KIND, Answer(None, False, 60.0, 60.0)), "1 kinds without an answer ['a kind'], 0 wanted"),
    ],
)
def test_each_target_is_missed_by_its_own_figure(seen: Seen, text: str) -> None:
    assert _missed(_results(seen)) == [text]


def test_ordinary_senders_must_be_answered_and_honest_prompts_in_time() -> None:
    late = Answer(200, False, 6.0, 6.0)
    quiet = Quiet(0.05, 0.06)
    crowded = Crowded("long: x", [_ANSWERED, _REFUSED], [late], 0.06, 0.07, 1, 0, must_be_ok=True, quiet=quiet)
    results = Results(crowded=[crowded], lags=[Lag("500 workers", [0.001], [0.001, 0.2])])
    assert _missed(results) == [
        "long: x: an honest prompt took 6.00 s, 0 failed; 5 s wanted",
        "long: x: 1 answers were no 200, 0 wanted",
        "500 workers: longest lag 200 ms (1 quiet), 50 wanted",
    ]


async def test_a_connection_that_nobody_opens_counts_as_closed(unused_tcp_port: int) -> None:
    answer = await exchange(("127.0.0.1", unused_tcp_port), Script([request("GET", "/")]), 5.0)
    assert answer.is_closed and answer.status is None and answer.is_refused

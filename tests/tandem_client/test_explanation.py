"""Tests `tandem explain`: what it shows of the gateway's JSON, and in which width."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from control_plane.explain.explanation import (
    AdmissionExplanation,
    Attempt,
    CachedTokens,
    Candidate,
    ClassCrossing,
    Explanation,
    GrantExplanation,
    HandOverExplanation,
    Move,
    PhaseSpan,
    RouteExplanation,
    Segment,
    Summary,
    UsageExplanation,
)
from tandem_client.cli.app import app
from tandem_client.cli.explanation import explanation_view, milliseconds
from tests.tandem_client.stub_gateway import StubGateway

SUMMARY = Summary(
    id="4f1c2d3e",
    account="acme",
    model="@tandem/demo",
    operation="chat",
    state="finished",
    started_ms=1_795_600_000_000,
    ttft_ms=40.0,
    duration_ms=540.0,
    prompt_tokens=120,
    cached_tokens=64,
    completion_tokens=51,
    prefill="prefill-0",
    decode="decode-1",
)
SECOND = Candidate("prefill", "prefill-1", 31.0, 12.0, 0.0, 19.0)
EXPLANATION = Explanation(
    SUMMARY,
    finish_reasons=["stop"],
    trace_id="ab" * 16,
    segments=[
        Segment("body", "gateway", 0.0, 0.4),
        Segment("text", "text", 0.4, 3.6),
        Segment("prefill", "prefill", 4.0, 35.0, "prefill-0"),
    ],
    phases=[PhaseSpan("prefill", "prefill-0", 4.0, 35.0, 56), PhaseSpan("decode", "decode-1", 39.0, 501.0, 50)],
    admission=AdmissionExplanation("batch", 2500.0, 7, 130.0, 5200.0),
    route=RouteExplanation(
        mode="handed_over",
        prefill="prefill-0",
        decode="decode-1",
        reason="the soonest of 2 prefill workers",
        candidates=[
            Candidate(
                "prefill",
                "prefill-0",
                *(22.0, 0.0, 3.0, 19.0, 25.0),
                CachedTokens(64, 0, 0),
                is_chosen=True,
                hand_over=HandOverExplanation("host-a", "host-b", 3 << 20, 2.5, 22.5, 0.0, 100 << 20),
            ),
            SECOND,
        ],
        runner_up=SECOND,
        attempts=[Attempt(0, "prefill-0", "decode-0", "Unavailable"), Attempt(1, "prefill-0", "decode-1", "accepted")],
    ),
    moves=[Move("hand_over", 38.0, "prefill-0", "decode-1", "route", 3 << 20, 120, 2.5, "shm")],
    usage=UsageExplanation(120, 56, 64, 60, 4, 0, 51, 0, 3 << 20, 35_000, 501_000, 1_500_000),
)


def _text(explained: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(explanation_view(explained))
    return console.export_text()


def test_an_explanation_fits_a_terminal_of_80_columns() -> None:
    assert max(map(len, _text(EXPLANATION.to_json()).splitlines())) <= 80


def test_an_explanation_shows_time_route_moves_and_cost() -> None:
    text = _text(EXPLANATION.to_json(), width=120)
    assert "first token after 40.0 ms, 540.0 ms in all, 100.0 tokens/s" in text
    assert "computing the prompt, prefill-0" in text
    assert re.search(r"prefill-0 +chosen", text)
    assert re.search(r"prefill-1 +runner-up", text)
    assert "attempt 1: prefill-0 → decode-0: Unavailable" in text
    assert "3.00 MiB over shm, 120 tokens, in 2.5 ms" in text
    assert "56 computed, 64 cached (60 from the pool, 4 from the store)" in text
    assert "1.500000 neurons" in text
    expected = "hand-over from host-a to host-b: 3.0 MiB at 100.0 MiB/s; 2.5 ms + 22.5 ms for the rest"
    assert f"{expected}\n" in re.sub(r" +\n", "\n", text)


def test_an_explanation_shows_what_was_expected_of_the_soonest_hand_over_if_there_was_none() -> None:
    assert EXPLANATION.route is not None
    late = HandOverExplanation("host-a", "host-b", 3 << 20, 80.0, 300.0, 40.0, 10 << 20)
    sooner = HandOverExplanation("host-c", "host-b", 3 << 20, 80.0, 200.0, 40.0, 15 << 20)
    candidates = [
        Candidate("prefill", "prefill-0", 520.0, 0.0, 0.0, 100.0, 420.0, hand_over=late),
        Candidate("prefill", "prefill-2", 420.0, 0.0, 0.0, 100.0, 320.0, hand_over=sooner),
        Candidate("decode", "decode-1", 150.0, 0.0, 0.0, 100.0, is_chosen=True),
    ]
    route = replace(EXPLANATION.route, mode="local", prefill="", candidates=candidates)
    text = _text(replace(EXPLANATION, route=route).to_json(), width=120)
    assert "host-c to host-b: 3.0 MiB at 15.0 MiB/s; 80.0 ms + 200.0 ms for the rest + 40.0 ms for room in the" in text
    assert "host-a" not in text


def test_an_explanation_shows_how_the_request_stood_when_it_came() -> None:
    text = _text(EXPLANATION.to_json(), width=120)
    assert "class batch, 7 waited already, predicted wait 2,500.0 ms" in text
    assert "predicted device time 130.0 ms; its account's counter for the model was at 5,200.0 ms" in text
    assert "grant" not in text
    assert EXPLANATION.admission is not None
    granted = replace(
        EXPLANATION.admission, grant=GrantExplanation(17, 4096, 3), prefill_grant=GrantExplanation(2, 500, 1)
    )
    text = _text(replace(EXPLANATION, admission=granted).to_json(), width=120)
    assert "grant 17 left 3 requests and 4,096 tokens at decode" in text
    assert "grant 2 left 1 requests and 500 tokens at prefill" in text
    at_once = replace(EXPLANATION, admission=AdmissionExplanation("default", 0.0, 0, 130.0, 0.0))
    elsewhere = replace(
        at_once, admission=AdmissionExplanation("default", 900.0, 0, 1.0, 0.0, num_waiting_elsewhere=12)
    )
    shown = _text(elsewhere.to_json(), width=120)
    assert "class default, 0 waited already at its gateway, 12 at others, predicted wait 900.0 ms" in shown
    assert "class default, nobody waited\n" in re.sub(r" +\n", "\n", _text(at_once.to_json(), width=120))
    of_release_before = EXPLANATION.to_json()
    del of_release_before["admission"]
    assert "When it came" not in _text(of_release_before)


def test_a_move_to_another_numerics_class_is_shown_with_both_classes() -> None:
    seam = ClassCrossing(17, "torch-2.13/cpu/cpp/float32", "torch-2.13/cuda-sm90/torch/bfloat16")
    moved = Move("migration", 90.0, "decode-1", "decode-0", "Draining", num_tokens=137, seam=seam)
    text = _text(replace(EXPLANATION, moves=[moved]).to_json(), width=200)
    assert f"other numerics from token 17 on: {seam.from_class} → {seam.to_class}" in text
    assert "other numerics" not in _text(EXPLANATION.to_json(), width=200)


def test_workers_have_their_names_and_texts_of_users_stay_as_they_are() -> None:
    explained = json.loads(json.dumps(EXPLANATION.to_json()).replace("prefill-0", "50d583690d380563"))
    explained["route"]["reason"] = "50d583690d380563 in 4.4 ms"
    explained["texts"] = {"prompt": "50d583690d380563", "answer": "two\nlines \x1b[2J"}
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(explanation_view(explained, {"50d583690d380563": "gpu-one"}))
    text = console.export_text()
    assert "gpu-one in 4.4 ms" in text
    assert "computing the prompt, gpu-one" in text
    assert text.count("50d583690d380563") == 1, "the prompt alone"
    assert "two\n" in text.replace(" ", "")
    assert "\x1b" not in text, "no text commands the terminal"


def test_time_that_no_part_has_is_shown() -> None:
    explained = EXPLANATION.to_json()
    assert "unexplained" in _text(explained), "40 ms are more than 39"
    assert "unexplained" not in _text({**explained, "unexplained_ms": 0.0})


def test_a_refused_request_has_no_empty_parts() -> None:
    refused = Explanation(
        Summary("1", "acme", "", "chat", "failed", 0, None, 1.0, error="ModelNotFound"),
    )
    text = _text(refused.to_json())
    assert "no model  failed (ModelNotFound)" in text
    assert "first token" not in text
    assert "Why it went there" not in text


@pytest.mark.parametrize(("number", "text"), [(0.0421, "42 µs"), (41.26, "41.3 ms"), (12_345.0, "12.3 s")])
def test_durations_have_the_unit_that_fits(number: float, text: str) -> None:
    assert milliseconds(number) == text


def test_the_command_prints_the_explanation_of_an_id(gateway: StubGateway) -> None:
    gateway.explanations["4f1c2d3e"] = EXPLANATION.to_json()
    answer = CliRunner().invoke(app, ["explain", "4f1c2d3e", "--url", gateway.url])
    assert answer.exit_code == 0
    assert re.search(r"prefill-0 +chosen", answer.stdout)
    as_json = CliRunner().invoke(app, ["explain", "4f1c2d3e", "--json", "--url", gateway.url])
    assert json.loads(as_json.stdout) == EXPLANATION.to_json()


def test_an_unknown_id_is_an_error(gateway: StubGateway) -> None:
    answer = CliRunner().invoke(app, ["explain", "../workers", "--url", gateway.url])
    assert (answer.exit_code, "tandem:" in answer.output) == (1, True)

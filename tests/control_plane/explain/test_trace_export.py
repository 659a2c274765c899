"""`tandem trace export` writes what was asked and what happened, without a text and without a hash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from control_plane.explain.explanation import (
    AdmissionExplanation,
    CachedTokens,
    Candidate,
    Explanation,
    RouteExplanation,
    Summary,
    UsageExplanation,
)
from control_plane.explain.prompt_blocks import PromptBlocks
from control_plane.explain.store import MAX_DOCUMENT_BYTES, ExplanationStore, document_of
from control_plane.simulator.traces import read_trace
from control_plane.storage.database import Database, database_url
from control_plane.storage.migrate import migrate
from control_plane.trace_command import main

CHAIN = b"".join(number.to_bytes(8, "big") * 2 for number in range(1024))
"""1,024 hashes of 16 bytes; of 16 tokens each."""
SECRET_TEXT = "what nobody may read"


def blocks(num_tokens: int, chain: bytes = CHAIN) -> PromptBlocks:
    return PromptBlocks.of(chain[: num_tokens // 16 * 16], 16)


def explanation(
    number: int, started_ms: int, num_prompt_tokens: int, prompt: PromptBlocks | None, model: str = "demo"
) -> Explanation:
    summary = Summary(
        f"request-{number}", "me", model, "chat", "finished", started_ms, 12.5, 80.0, prefill="p", decode="d"
    )
    chosen = Candidate("prefill", "p", 9.0, 1.0, 2.0, 3.0, 3.0, CachedTokens(512, 16, 0), is_chosen=True)
    route = RouteExplanation("handed_over", "p", "d", "soonest", {"prefill": 6.0}, [chosen])
    usage = UsageExplanation(prompt_tokens=num_prompt_tokens, cached_tokens=500, completion_tokens=7)
    return Explanation(summary, route=route, usage=usage, prompt_blocks=prompt)


def differing_in(place: int) -> bytes:
    """A chain whose blocks of 512 tokens differ from block `place` on."""
    size = 512
    return CHAIN[: place * size] + bytes(byte ^ 1 for byte in CHAIN[place * size :])


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(kept: Sequence[Explanation], *arguments: str) -> tuple[int, str, str]:
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)

        async def fill() -> None:
            database = Database(database_url("", state))
            await migrate(database)
            keeper = ExplanationStore(database, hours=1e6, max_rows=1000)
            for each in kept:
                keeper.add(each)
            await keeper.drain()
            await database.close()

        with capture_logs():
            asyncio.run(fill())
            code = main(["export", *arguments, "--state-dir", str(state)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_lines_have_arrivals_lengths_shared_blocks_and_outcomes(
    export: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    kept = [
        explanation(0, 5_000, 1_600, blocks(1_600)),
        explanation(1, 5_250, 2_048, blocks(2_048)),
        explanation(2, 6_000, 1_100, blocks(1_100, differing_in(1))),
        explanation(3, 6_500, 600, None),
        replace(explanation(4, 6_600, 600, None), usage=UsageExplanation()),
    ]
    code, out, err = export(kept)
    assert (code, err) == (0, "4 requests written, 1 left out: they have no prompt or no answer\n")
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 250, 1_000, 1_500]
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2], [0, 1, 2, 3], [0, 4], [-1]]
    assert lines[0]["input_length"] == 1_600 and lines[0]["output_length"] == 7
    assert lines[0]["model"] == "demo"
    assert lines[0]["tandem"] == {
        "state": "finished",
        "ttft_ms": 12.5,
        "duration_ms": 80.0,
        "mode": "handed_over",
        "prefill": "p",
        "decode": "d",
        "predicted_ms": {"prefill": 6.0},
        "predicted_cached_tokens": 528,
        "cached_tokens": 500,
    }
    path = tmp_path / "trace.jsonl"
    path.write_text(out)
    assert [each.full_blocks for each in read_trace(path)] == [(0, 1, 2), (0, 1, 2, 3), (0, 4), (-1,)]


def test_many_requests_of_one_model_go_into_a_file(
    export: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.trace_command._ROWS", 4)
    kept = [explanation(number, 1_000 + number // 3, 600, None, "ab"[number % 2]) for number in range(30)]
    code, out, _ = export(kept, "--model", "a", "--out", str(tmp_path / "trace.jsonl"))
    assert (code, out) == (0, "")
    assert [round(1000 * each.arrival) for each in read_trace(tmp_path / "trace.jsonl")] == [
        number // 3 for number in range(0, 30, 2)
    ]


def test_accounts_are_numbers_and_classes_those_of_the_requests(
    export: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    kept = []
    for number, (account, service_class) in enumerate([("me", "batch"), ("you", "default"), ("me", "priority")]):
        each = explanation(number, 1_000 + number, 600, None)
        summary = replace(each.summary, account=account)
        kept.append(replace(each, summary=summary, admission=AdmissionExplanation(service_class, 0.0, 0, 9.0, 0.0)))
    path = tmp_path / "trace.jsonl"
    path.write_text(export([*kept, explanation(3, 2_000, 600, None)])[1])
    found = [(each.account, each.service_tier) for each in read_trace(path)]
    assert [account for account, _ in found] == ["account-0", "account-1", "account-0", "account-0"]
    assert [tier for _, tier in found] == ["batch", "default", "priority", "default"]


def test_sessions_are_numbers(export: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    keys = ["a" * 32, "", "b" * 32, "a" * 32]
    kept = [replace(explanation(number, 1_000 + number, 600, None), session=key) for number, key in enumerate(keys)]
    path = tmp_path / "trace.jsonl"
    path.write_text(export(kept)[1])
    assert [each.session for each in read_trace(path)] == ["session-0", "", "session-1", "session-0"]
    assert "aaaa" not in path.read_text()


def test_only_the_last_hours_are_written(export: Callable[..., tuple[int, str, str]]) -> None:
    assert "0 requests written" in export([explanation(0, 1_000, 600, None)], "--hours", "1")[2]


def test_a_file_that_cannot_be_written_is_said(export: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, _, err = export([], "--out", str(tmp_path / "nowhere" / "trace.jsonl"))
    assert code == 2 and "nowhere" in err


def test_no_hash_leaves_and_no_text(export: Callable[..., tuple[int, str, str]]) -> None:
    asked = explanation(0, 1_000, 1_600, blocks(1_600))
    out = export([replace(asked, requested_model=SECRET_TEXT)])[1]
    assert not any(each.hex() in out for each in blocks(1_600).hashes)
    assert SECRET_TEXT not in out


@pytest.mark.parametrize(
    ("grain", "num_hashes", "expected"), [(16, 31, 0), (16, 32, 1), (16, 100, 3), (48, 25, 2), (1024, 2, 2)]
)
def test_a_sample_is_the_hash_at_the_end_of_each_block(grain: int, num_hashes: int, expected: int) -> None:
    chain = b"".join(number.to_bytes(16, "big") for number in range(num_hashes))
    sampled = PromptBlocks.of(chain, grain)
    per_block = max(1, 512 // grain)
    assert sampled.num_tokens == per_block * grain
    ends = [per_block * (place + 1) - 1 for place in range(expected)]
    assert sampled.hashes == [number.to_bytes(16, "big")[:8] for number in ends]
    assert PromptBlocks.from_json(sampled.to_json()) == sampled


def test_a_very_long_prompt_has_its_beginning_only_and_fits_a_document() -> None:
    sampled = PromptBlocks.of(CHAIN * 20, 16)
    assert len(sampled.hashes) == 256
    assert len(document_of(explanation(0, 0, 400_000, sampled))) <= MAX_DOCUMENT_BYTES

"""`tandem replay` shows the figures of each policy in a table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tandem_client.cli.replay import view


def found(half: float | None) -> dict[str, Any]:
    names = (
        "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p99", "goodput_share", "goodput_per_second", "cached_share",
        "handed_over_share", "accepted_met_share", "refused_would_share",
    )  # fmt: skip
    figures = {name: {"mean": 0.5 if "share" in name else 1234.5, "half": half} for name in names}
    figures["refused_share"] = {"mean": 0.0, "half": half}
    return {
        "trace": "t.jsonl",
        "num_prefill": 3,
        "num_decode": 5,
        "load": 0.9,
        "num_seeds": 1 if half is None else 5,
        "policies": {"tandem": figures},
    }


def shown(half: float | None) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(view(found(half)))
    return out.getvalue()


def test_the_table_has_the_fleet_the_load_and_a_row_for_each_policy() -> None:
    text = shown(None)
    assert "t.jsonl on 3 prefill and 5 decode workers (simulated), load 0.9, 1 run" in text
    assert "1,234" in text and "50.0%" in text and "±" not in text


def test_several_runs_show_intervals() -> None:
    assert "1,234 ± 0" in shown(0.25) and "5 runs" in shown(0.25)


def test_refusals_and_accounts_are_shown_where_there_are_any() -> None:
    assert "refused" not in shown(None) and "account" not in shown(None)
    with_both = found(None)
    figures = with_both["policies"]["tandem"]
    with_both["policies"]["tandem"] = figures | {
        "refused_share": {"mean": 0.25, "half": None},
        "share.greedy": {"mean": 0.75, "half": None},
        "share.small": {"mean": 0.25, "half": None},
    }
    out = io.StringIO()
    Console(file=out, width=300).print(view(with_both))
    assert "refused" in out.getvalue() and "greedy 75.0%, small 25.0%" in out.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_runs_the_control_plane(tmp_path: Path, capfd: pytest.CaptureFixture[str], as_json: bool) -> None:
    trace = tmp_path / "t.jsonl"
    lines = (
        json.dumps({"timestamp": 100 * number, "input_length": 600, "output_length": 9, "hash_ids": [number, number]})
        for number in range(10)
    )
    trace.write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["replay", str(trace), "--workers", "2", *(["--json"] if as_json else [])])
    assert done.exit_code == 0
    assert ('"num_prefill": 1' if as_json else "t.jsonl on 1 prefill and 1 decode workers") in done.output


def test_an_error_of_the_command_is_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert CliRunner().invoke(app, ["replay", "nowhere.jsonl"]).exit_code == 2
    assert "nowhere.jsonl" in capfd.readouterr().err

"""An engine's turns give the right speeds, shares and ratios."""

from __future__ import annotations

import pytest

from benchmarks.engine import stats
from benchmarks.engine.limits import Limits
from benchmarks.engine.plot import draw
from benchmarks.engine.stats import WANTED, ByPhase, Phase, Turns
from benchmarks.lib.engine_models import SHAPES, ShapeFacts

_LIMITS = Limits(read_bytes_per_second=33.0e9, flops_per_second=380e9, how="by hand")


def _turns(*speeds: float, limit: float = 100.0) -> Turns:
    return Turns(list(speeds), 0, 1 << 30, [_LIMITS] * len(speeds), [limit] * len(speeds))


def _everybody(speed: float) -> ByPhase:
    names = {want.ours for want in WANTED} | {want.other for want in WANTED}
    return {phase: {name: _turns(speed) for name in names} for phase in {want.phase for want in WANTED}}


def test_shapes_are_those_of_the_measurements() -> None:
    small, large = ShapeFacts(SHAPES["S"]), ShapeFacts(SHAPES["M"])
    assert (small.num_parameters, small.num_step_parameters) == (124_668_672, 100_092_672)
    assert (large.num_parameters, large.num_step_parameters) == (506_656_000, 465_696_000)
    assert (small.kv_bytes_per_token, large.kv_bytes_per_token) == (24_576, 49_152)


@pytest.mark.parametrize(
    ("batch", "weight_bytes", "tokens_per_second"), [(1, 4, 17.5), (8, 4, 128), (32, 4, 382), (0, 4, 431), (1, 2, 34.5)]
)
def test_the_roofline_of_shape_m_is_the_one_worked_out_by_hand(
    batch: int, weight_bytes: int, tokens_per_second: float
) -> None:
    limit = Phase(batch, 512).limit_tokens_per_second(ShapeFacts(SHAPES["M"]), weight_bytes, _LIMITS)
    assert limit == pytest.approx(tokens_per_second, rel=0.01)


def test_a_turn_is_held_against_what_the_machine_could_do_then() -> None:
    turns = _turns(10.0, 30.0, 80.0)
    turns.rooflines = [20.0, 40.0, 100.0]
    assert turns.share == 0.75


def test_limits_are_shown_with_their_spread() -> None:
    seen = [Limits(20e9, 200e9, "by hand"), Limits(40e9, 230e9, "by hand"), Limits(33e9, 235e9, "by hand")]
    assert stats.limit_sheet("M", seen).rows == [("by hand", "33 (20-40)", "230 (200-235)")]


def test_an_engine_counts_by_its_median_and_shows_its_spread() -> None:
    figures = _turns(10.0, 30.0, 80.0, limit=60.0).figures
    assert figures["tokens_per_second"] == 30.0
    assert (figures["tokens_per_second.low"], figures["tokens_per_second.high"]) == (10.0, 80.0)
    assert figures["roofline_share"] == 0.5


def test_ratios_are_of_ours_to_everybody_else() -> None:
    phases = {"prefill": {"mine": _turns(6.0), "yours": _turns(4.0)}}
    figures = stats.figures("S", phases, ["mine"])
    assert figures["S.prefill.ratio.mine_to_yours"] == 1.5
    assert "S.prefill.ratio.yours_to_mine" not in figures
    assert figures["S.prefill.yours.peak_mib"] == 1024.0


def test_targets_whose_sides_are_there_are_judged_and_the_others_named() -> None:
    equal, unmeasured = stats.targets(_everybody(90.0))
    assert unmeasured == []
    met = {target.text for target in equal if target.is_met}
    assert met == {
        "decode_b1: tandem_lean_fp32 / openvino = 1.00, at least 1",
        "prefill: tandem_lean_fp32 / openvino = 1.00, at least 1",
        "decode_b1: tandem_compat / tandem_lean_fp32 = 1.00, at least 0.85",
        "decode_b8: tandem_compat / tandem_lean_fp32 = 1.00, at least 0.85",
        "decode_b1: tandem_lean_fp32 at 90% of the roofline, at least 85%",
    }
    some, unmeasured = stats.targets({"prefill": {"tandem_lean_fp32": _turns(9.0), "openvino": _turns(10.0)}})
    assert [target.line for target in some] == ["MISSED: prefill: tandem_lean_fp32 / openvino = 0.90, at least 1"]
    assert len(unmeasured) == len(WANTED)  # all ratios but one, and the roofline


def test_tables_leave_a_dash_where_an_engine_was_not_measured() -> None:
    phases = (Phase(0, 512), Phase(8, 512), Phase(32, 512))
    turns = _turns(10.0, 12.0)
    turns.num_disturbed = 1
    tables = stats.sheets("M", {"prefill": {"a": _turns(5.0), "b": turns}, "decode_b8": {"a": turns}}, phases, ["a"])
    speeds, shares, ratios = tables
    assert speeds.head == ("", "prefill 512", "decode, batch 8")
    assert speeds.rows == [("a", "5 (5-5)", "11 (10-12) 1!"), ("b", "11 (10-12) 1!", "-")]
    assert shares.rows[1] == ("b", "11%, 1,024", "-")
    assert ratios.rows == [("a / b", "0.45", "-")]


def test_the_plot_is_the_same_for_the_same_figures(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plots")
    phases = (Phase(0, 512), Phase(1, 512))
    measured = {"S": {"prefill": {"a": _turns(50.0)}, "decode_b1": {"a": _turns(50.0), "b": _turns(25.0)}}}
    for name in ("one.svg", "two.svg"):
        draw(measured, phases, folder / name)
    assert (folder / "one.svg").read_bytes() == (folder / "two.svg").read_bytes()

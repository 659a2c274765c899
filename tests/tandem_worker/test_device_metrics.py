"""A worker's devices and totals are exported as they are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.v1 import types_pb2 as pb
from tandem_engine.encoder import core as encoder_core
from tandem_engine.messages import EngineStats
from tandem_engine.scheduling import ledger
from tandem_runtime import metrics
from tandem_worker import device_metrics, engine_totals, stats
from tests.scrape import Scrape

GIB = 1024**3


@pytest.fixture(autouse=True)
def measured() -> Iterator[None]:
    metrics.configure("tandem-test", None)
    yield
    metrics.shutdown()


def card(index: int = 0, joules: int = 0, own_bytes: int = 3 * GIB) -> pb.Device:
    return pb.Device(
        index=index,
        total_bytes=80 * GIB,
        used_bytes=10 * GIB,
        free_bytes=70 * GIB,
        foreign_bytes=6 * GIB,
        own_bytes=own_bytes,
        utilization_percent=97,
        temperature_celsius=84,
        power_milliwatts=345_678,
        throttle_reasons=["sw_power_cap"],
        energy_millijoules=1000 * joules,
        num_corrected_ecc_errors=12,
        num_uncorrected_ecc_errors=1,
        xid_errors={79: 2},
    )


def test_every_figure_of_a_card_is_exported() -> None:
    device_metrics.export(lambda: pb.MemoryReport(devices=[card(joules=500)]), dict)
    found = Scrape(metrics.exposition())
    owners = {labels["owner"]: value for labels, value in found.series("tandem_device_memory_bytes")}
    assert owners == {"tandem": 3 * GIB, "foreign": 6 * GIB, "free": 70 * GIB}, "the driver has 1 GiB"
    assert found.value("tandem_device_silence_seconds") == 0
    assert found.series("tandem_device_utilization") == [({"device": "0"}, 0.97)]
    assert found.series("tandem_device_power_watts") == [({"device": "0"}, 345.678)]
    assert found.series("tandem_device_temperature_celsius") == [({"device": "0"}, 84)]
    assert found.series("tandem_device_throttled") == [({"device": "0", "reason": "sw_power_cap"}, 1)]
    assert found.series("tandem_device_energy_joules_total") == [({"device": "0"}, 500)]
    assert found.series("tandem_device_xid_errors_total") == [({"device": "0", "xid": "79"}, 2)]
    errors = {labels["kind"]: value for labels, value in found.series("tandem_device_ecc_errors_total")}
    assert errors == {"corrected": 12, "uncorrected": 1}


def test_a_reason_that_has_passed_is_exported_no_longer() -> None:
    devices = [card()]
    device_metrics.export(lambda: pb.MemoryReport(devices=devices), dict)
    assert Scrape(metrics.exposition()).value("tandem_device_throttled") == 1
    devices[0] = pb.Device(index=0)
    found = Scrape(metrics.exposition())
    assert found.series("tandem_device_throttled") == []


def test_a_figure_that_is_not_known_has_no_series() -> None:
    known = pb.Device(index=0, mig_instance="3/0", total_bytes=40 * GIB, used_bytes=4 * GIB, free_bytes=36 * GIB)
    lost = pb.Device(index=1, error="memory: GPU is lost")
    device_metrics.export(lambda: pb.MemoryReport(devices=[known, lost]), dict)
    found = Scrape(metrics.exposition())
    assert found.series("tandem_device_memory_bytes") == [({"device": "0/3/0", "owner": "free"}, 36 * GIB)]
    series = {name for name in found.types if name.startswith("tandem_device") and found.series(name)}
    assert series == {"tandem_device_memory_bytes", "tandem_device_silence_seconds"}


def test_zero_is_a_figure() -> None:
    idle = pb.Device(total_bytes=GIB, own_bytes=0, foreign_bytes=0, utilization_percent=0, power_milliwatts=0)
    device_metrics.export(lambda: pb.MemoryReport(devices=[idle]), dict)
    found = Scrape(metrics.exposition())
    owners = {labels["owner"]: value for labels, value in found.series("tandem_device_memory_bytes")}
    assert owners == {"tandem": 0, "foreign": 0, "free": 0}
    assert found.value("tandem_device_utilization") == found.value("tandem_device_power_watts") == 0


@pytest.mark.parametrize("devices", [[], [card()]])
def test_while_nvml_does_not_answer_its_silence_is_exported_alone(devices: list[pb.Device]) -> None:
    device_metrics.export(lambda: pb.MemoryReport(devices=devices, device_age_seconds=12), dict)
    found = Scrape(metrics.exposition())
    assert found.value("tandem_device_silence_seconds") == 12
    series = {name for name in found.types if name.startswith("tandem_device") and found.series(name)}
    assert series == {"tandem_device_silence_seconds"}


def test_energy_per_token_is_the_energy_of_a_window_over_its_tokens() -> None:
    now, devices, tokens = [0.0], [card(0, 1000), card(1, 50, own_bytes=0)], {"prefill": 10.0, "decode": 0.0}
    device_metrics.export(lambda: pb.MemoryReport(devices=devices), lambda: tokens, lambda: now[0])

    def exported() -> dict[tuple[str, str], float]:
        name = "tandem_device_energy_per_token_joules"
        series = Scrape(metrics.exposition()).series(name)
        return {(labels["device"], labels["phase"]): value for labels, value in series}

    assert exported() == {}
    now[0], devices[0], tokens = 12.0, card(0, 1600), {"prefill": 40.0, "decode": 300.0}
    assert exported() == {("0", "prefill"): 20.0, ("0", "decode"): 2.0}, "card 1 has nothing of this worker"
    now[0], devices[0] = 13.0, card(0, 1700)
    assert exported() == {("0", "prefill"): 20.0, ("0", "decode"): 2.0}, "the window is too short"
    now[0], devices[0] = 30.0, card(0, 9000)
    assert exported() == {}, "no token in this window"


def test_one_card_is_this_workers_even_if_nvml_cannot_tell_whose_memory_it_is() -> None:
    now, devices, tokens = [0.0], [card(0, 0, own_bytes=0)], {"decode": 0.0}
    device_metrics.export(lambda: pb.MemoryReport(devices=devices), lambda: tokens, lambda: now[0])
    now[0], devices[0], tokens = 10.0, card(0, 60, own_bytes=0), {"decode": 30.0}
    found = Scrape(metrics.exposition())
    assert found.series("tandem_device_energy_per_token_joules") == [({"device": "0", "phase": "decode"}, 2.0)]


def test_a_machine_without_cards_has_no_series_of_devices() -> None:
    device_metrics.export(pb.MemoryReport, dict)
    assert not [name for name in Scrape(metrics.exposition()).types if name.startswith("tandem_device")]


@pytest.mark.parametrize(
    ("totals", "counters"),
    [(engine_totals.GENERATION, ledger.COUNTERS), (engine_totals.ENCODER, encoder_core.COUNTERS)],
)
def test_every_counter_of_an_engine_has_a_metric(
    totals: tuple[engine_totals.Total, ...], counters: tuple[str, ...]
) -> None:
    assert sorted(total.counter for total in totals) == sorted(counters)


def test_a_workers_pool_and_totals_are_exported() -> None:
    counters = {name: float(index) for index, name in enumerate(ledger.COUNTERS)}
    now = EngineStats(2, 3, 100, 10, 4, 3, 2, 1, counters)
    stats.export_metrics(lambda: now, lambda: 1024)
    found = Scrape(metrics.exposition())
    sizes = {labels["state"]: value for labels, value in found.series("tandem_worker_kv_size_bytes")}
    assert sizes == {"free": 4096, "cached": 3072, "used": 2048, "held": 1024}
    assert found.value("tandem_worker_kv_blocks") == 10
    assert found.value("tandem_worker_requests", state="running") == 2
    assert found.value("tandem_worker_tokens_generated_total") == counters["tokens_generated"]
    assert found.types["tandem_worker_longest_copy_seconds"] == "gauge"
    assert found.value("tandem_worker_import_size_bytes_total") == counters["bytes_imported"]
    assert stats.tokens_by_phase(now) == {
        "prefill": counters["prompt_tokens_computed"],
        "decode": counters["tokens_generated"],
    }


def test_a_worker_that_loads_exports_nothing_of_its_engine() -> None:
    stats.export_metrics(lambda: None, lambda: 0)
    assert not [name for name in Scrape(metrics.exposition()).types if name.startswith("tandem_worker")]

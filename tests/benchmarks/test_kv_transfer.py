"""Figures of transfers have the measured values and the right names, and count every CPU second."""

from __future__ import annotations

import os

import pytest

from benchmarks.kv_transfer.__main__ import MB, Measured, document_figures, ratios
from benchmarks.kv_transfer.bare_socket import bare_socket
from benchmarks.kv_transfer.transfers import cpu_seconds


def _by_subject(num_bytes: int) -> dict[str, Measured]:
    seconds = {"memcpy": 0.010, "bare_socket": 0.040, "tcp_link": 0.05, "tcp": 0.08, "grpc": 0.2, "shm": 0.014}
    return {name: Measured(num_bytes, [each, each, 9.0], 0.3) for name, each in seconds.items()}


def test_figures_are_flat_and_of_medians() -> None:
    figures = document_figures({16 * MB: _by_subject(16 * MB)})
    assert figures["mb16.memcpy.ms.p50"] == 10.0
    assert figures["mb16.memcpy.gb_per_second"] == pytest.approx(16 * MB / 0.01 / 1e9, rel=1e-5)
    assert figures["mb16.grpc.cpu_seconds_per_gb"] == pytest.approx(0.1 / (16 * MB / 1e9), rel=1e-5)
    assert all(isinstance(value, float) for value in figures.values())


def test_ratios_say_how_many_memcpys_and_which_share_of_the_bare_loop() -> None:
    found = ratios(_by_subject(MB))
    assert found["ratio.shm_to_memcpy"] == pytest.approx(1.4)
    assert found["ratio.shm_less_1ms_to_memcpy"] == pytest.approx(1.3)
    assert found["ratio.tcp_link_to_bare_socket"] == pytest.approx(0.8)
    assert found["ratio.grpc_to_bare_socket"] == pytest.approx(0.2)


def test_the_bare_loop_brings_every_byte() -> None:
    buffer = bytearray(3 * MB)
    with bare_socket(3 * MB) as bare:
        bare.receive(memoryview(buffer))
        assert bare.pid != os.getpid() and cpu_seconds([bare.pid]) > 0
    assert buffer == b"x" * (3 * MB)

"""A whole step of every family runs on a device that is not the CPU, and waits for it once.

The device is fake: it has no values. So this finds tensors on the wrong device and hidden waits, not wrong numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests import checkpoints
from tests.tandem_engine.fake_device import device, steps


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Run all families in one process; torch cannot take a registered device back."""
    if reason := device.why_not():
        pytest.skip(reason)
    module = "tests.tandem_engine.fake_device.steps"
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("family", steps.FAMILIES)
def test_a_step_stays_on_its_device_and_waits_for_it_once(outcomes: dict[str, Any], family: str) -> None:
    outcome = outcomes["steps"][family]
    assert not isinstance(outcome, str), outcome
    assert len(outcome) == 2, "see `steps.run`"
    for synchronisations in outcome:
        assert len(synchronisations) <= 1, synchronisations


def test_no_family_of_the_other_tests_is_left_out() -> None:
    types = {make().model_type for make in steps.FAMILIES.values()}
    assert types >= {make().model_type for make in checkpoints.CONFIGS.values()}


def test_the_fake_device_finds_tensors_of_two_devices_and_counts_waits(outcomes: dict[str, Any]) -> None:
    found = outcomes["mistakes"]
    assert "FakeTensorDeviceMismatchError" in found.pop("mismatch")
    for name in ("nonzero", "mask"):  # their shape is on the device
        assert "DynamicOutputShapeException" in found.pop(name)
    waits = {"item": 1, "tolist": 4, "if": 1, "download": 1, "upload": 1, "tensor": 1, "nothing": 0}
    assert found == waits

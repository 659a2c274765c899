"""Settings of a gateway that cannot work are refused at start."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.settings import ControlPlaneSettings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"head_seconds": 0.0}, "head_seconds is 0.0, must be above 0"),
        ({"max_connections": -1}, "max_connections is -1, must be above 0"),
        ({"events_rows": 0}, "events_rows is 0, must be above 0"),
        ({"events_days": 0.0}, "events_days is 0.0, must be above 0"),
        ({"events_days": float("inf")}, "events_days is inf, must be a number of days"),
        ({"events_days": float("nan")}, "events_days is nan, must be a number of days"),
        ({"forwarded_allow_ips": ("proxy",)}, "forwarded_allow_ips has 'proxy', which is no address or network"),
        ({"max_bodies_bytes": 1_000}, "max_bodies_bytes is 1,000, less than the 10,000,000 of one body"),
    ],
)
def test_a_limit_that_lets_nothing_through_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ControlPlaneSettings(**values)


def test_addresses_networks_and_everybody_can_be_believed() -> None:
    assert ControlPlaneSettings(forwarded_allow_ips=("10.0.0.7", "10.0.0.0/8", "fd00::/8", "*"))


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_time_to_drain_that_never_ends_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="drain_seconds is"):
        ControlPlaneSettings(drain_seconds=seconds)


@pytest.mark.parametrize("name", ["max_waiting", "max_waiting_per_account", "tokenizer_cache_bytes"])
def test_a_bound_below_nothing_is_refused(name: str) -> None:
    values: dict[str, Any] = {name: -1}
    with pytest.raises(ValueError, match=f"{name} is -1, must be 0 or more"):
        ControlPlaneSettings(**values)
    values[name] = 0
    ControlPlaneSettings(**values)


def test_a_gateway_drains_as_long_as_the_longest_request_may_take() -> None:
    assert ControlPlaneSettings().longest_drain_seconds == 600.0
    assert ControlPlaneSettings(request_timeout_seconds=3600.0).longest_drain_seconds == 3600.0
    assert ControlPlaneSettings(drain_seconds=30.0).longest_drain_seconds == 30.0
    assert ControlPlaneSettings(drain_seconds=0.0).longest_drain_seconds == 0.0

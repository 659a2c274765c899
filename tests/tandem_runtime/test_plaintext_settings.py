"""Until when plain text and the MACs of release 0.2 are used."""

from __future__ import annotations

import pytest

from control_plane.settings import ControlPlaneSettings
from kv_transfer_svc.settings import KvSettings
from tandem_runtime.plaintext_settings import until_unix_seconds
from tandem_worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 0.0), ("1970-01-02", 86_400.0), ("1970-01-01T01:00:00+01:00", 0.0), ("1970-01-01T00:00:01", 1.0)],
)
def test_the_end_of_the_upgrade_is_a_date_or_a_time(text: str, seconds: float) -> None:
    assert until_unix_seconds(text, "plaintext_until") == seconds


def test_a_date_that_is_none_is_refused_with_the_form() -> None:
    with pytest.raises(ValueError, match=r"plaintext_until is 'soon'; give .* such as 2026-12-31"):
        until_unix_seconds("soon", "plaintext_until")


@pytest.mark.parametrize("settings", [ControlPlaneSettings, KvSettings, WorkerSettings])
def test_a_service_that_could_not_tell_the_end_of_the_upgrade_does_not_start(settings: type) -> None:
    with pytest.raises(ValueError, match="plaintext_until is 'soon'"):
        settings(plaintext_until="soon")


@pytest.mark.parametrize("settings", [ControlPlaneSettings, KvSettings])
def test_handles_carry_macs_until_the_later_of_two_dates(settings: type) -> None:
    assert settings().macs_until == 0.0
    assert settings(hmac_handles_until="1970-01-02").macs_until == 86_400.0
    assert settings(hmac_handles_until="1970-01-02", plaintext_until="1970-01-03").macs_until == 2 * 86_400.0
    assert settings(hmac_handles_until="1970-01-03", plaintext_until="1970-01-02").macs_until == 2 * 86_400.0
    with pytest.raises(ValueError, match="hmac_handles_until is 'soon'"):
        settings(hmac_handles_until="soon")

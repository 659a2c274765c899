"""Fixtures for tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tandem_client.stub_gateway import StubGateway, stub_gateway


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    with stub_gateway() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TANDEM_BASE_URL", "TANDEM_TOKEN", "TANDEM_ACCOUNT", "TANDEM_CONFIG"):
        monkeypatch.delenv(name, raising=False)

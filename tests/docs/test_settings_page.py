"""The page of settings has every setting of every service, as the code has it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from infra.site import settings_page
from infra.site.settings_page import PAGE, SERVICES, is_number, unit_of
from tandem_runtime.settings import fields_of
from tests.docs.markdown import tables


def test_the_page_is_what_its_script_writes() -> None:
    assert PAGE.read_text() == settings_page.page(), "run `python -m infra.site.settings_page`, commit the result"


def test_each_service_has_a_row_for_each_field() -> None:
    services = [rows for _, rows in tables(PAGE.read_text())][1:]
    names = [[field.name for field in dataclasses.fields(settings) if field.init] for _, _, settings in SERVICES]
    found = [
        [row.split("`")[1].replace("[no-]", "").lstrip("-").replace("-", "_") for row in rows[2:]] for rows in services
    ]
    assert found == names


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service[2].__name__)
def test_every_number_has_a_unit(service: tuple[str, str, type]) -> None:
    fields = fields_of(service[2], service[1])
    assert [field.name for field in fields if is_number(field) and not unit_of(field)] == []


def test_a_check_fails_for_a_page_that_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "settings.md"
    monkeypatch.setattr(settings_page, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["settings_page", "--check"])
    assert settings_page.main() == 1
    assert "python -m infra.site.settings_page" in capsys.readouterr().err
    page.write_text(settings_page.page())
    assert settings_page.main() == 0

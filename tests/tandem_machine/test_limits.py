"""An error for lack of threads, processes or folders says what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_client.cli.up import CannotStart, prepare_logs
from tandem_machine.limits import with_remedy


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: can't start new thread",
        "terminate called after throwing 'std::system_error'\n  what():  Resource temporarily unavailable",
        str(BlockingIOError(11, "Resource temporarily unavailable")),
    ],
)
def test_a_lack_of_threads_is_named_with_what_to_raise(text: str) -> None:
    assert with_remedy(text).startswith(text) and "pids.max" in with_remedy(text)


def test_other_errors_stay_as_they_are() -> None:
    assert with_remedy("no such file") == "no such file"


def test_logs_that_cannot_be_written_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(CannotStart, match="set TANDEM_STATE_DIR to a folder that can be written"):
        prepare_logs([], 8642)

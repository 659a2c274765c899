"""What follows from the attached workers is made anew only after a change."""

from __future__ import annotations

from control_plane.fleet.attached import Attached, Everyone


def test_the_version_is_another_after_each_change_and_after_nothing_else() -> None:
    attached = Attached({"a"})
    versions = [attached.version]
    for change in (attached.add, attached.add, attached.discard, attached.discard):
        change("b")
        versions.append(attached.version)
    assert versions == [0, 1, 1, 2, 2], "a link that cannot be opened discards its worker five times a second"
    assert set(attached) == {"a"} and "b" not in attached


def test_all_count_as_attached_until_somebody_says_who_is() -> None:
    assert "anybody" in Everyone()

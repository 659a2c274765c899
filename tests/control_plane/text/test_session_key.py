"""A session belongs to its account and model, and its key is small."""

from __future__ import annotations

from itertools import combinations

from control_plane.text.request import session_key


def test_the_same_id_of_another_account_or_model_is_another_session() -> None:
    keys = [session_key(account, model, "id") for account in ("a", "b") for model in ("m", "n")]
    assert len(set(keys)) == 4 and session_key("a", "m", "id") == keys[0]


def test_no_two_splits_of_the_same_text_are_one_session() -> None:
    splits = [("abc"[:i], "abc"[i:j], "abc"[j:]) for i, j in combinations(range(3), 2)]
    assert len({session_key(*split) for split in splits}) == len(splits)


def test_a_key_has_32_characters_whatever_the_id_and_no_id_is_no_session() -> None:
    assert {len(session_key("a", "m", text)) for text in ("i", "i" * 256, "\ud800")} == {32}
    assert session_key("a", "m", "") == ""

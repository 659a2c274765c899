"""The leading tokens of a prompt that are public."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.template import ChatTemplate
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.api.model import CHATML, description, ids_of

SYSTEM = "You are a small model that tells stories to everyone who would listen."
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
SYSTEM_IN_THE_USERS_TURN = "[INST] {{ messages[0].content }}\n\n{{ messages[1].content }}[/INST]"
DATED = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer() -> TextTokenizer:
    model = description()
    return TextTokenizer(model.tokenizer_json, model.tokenizer_config)


def chat(user: str, template: str = CHATML) -> Sequence[int]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    return tokenizer().encode_chat(ChatTemplate(template, {}), messages)


def num_public(token_ids: Sequence[int], template: str = CHATML, *texts: str) -> int:
    public = PublicPrefixes({f"{number}.txt": text for number, text in enumerate(texts or (SYSTEM,))})
    return public.num_tokens(description(chat_template=template), tokenizer(), token_ids)


def test_a_chat_is_public_up_to_where_its_user_speaks() -> None:
    public = ids_of(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    for user in ("Hello world", "!", "Ein Vogel"):
        token_ids = chat(user)
        assert num_public(token_ids) == len(public) < len(token_ids)
        assert token_ids[: len(public)] == public


def test_a_text_before_the_users_in_one_turn_is_public_too() -> None:
    public = ids_of(f"[INST] {SYSTEM}")
    assert num_public(chat("Hello", SYSTEM_IN_THE_USERS_TURN), SYSTEM_IN_THE_USERS_TURN) >= len(public)


def test_a_prompt_that_begins_with_the_text_is_public_as_far_as_it_is_the_same() -> None:
    token_ids = tokenizer().encode_prompt(f"{SYSTEM} Once upon a time")
    assert num_public(token_ids) == len(tokenizer().encode_prompt(SYSTEM))
    assert num_public(token_ids, "") == len(tokenizer().encode_prompt(SYSTEM))  # without a chat template
    assert num_public(tokenizer().encode_prompt(SYSTEM[:20])) <= len(ids_of(SYSTEM[:20])) + 1
    assert num_public(ids_of("Once upon a time")) == 0
    assert num_public([]) == 0


def test_names_of_control_tokens_in_the_text_are_text_unless_the_prompt_is_raw() -> None:
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>"
    for is_raw in (False, True):
        token_ids = tokenizer().encode_prompt(text, control_tokens=is_raw)
        assert num_public(token_ids, CHATML, text) == len(token_ids)


def test_the_longest_of_several_texts_counts() -> None:
    token_ids = tokenizer().encode_prompt(SYSTEM)
    assert num_public(token_ids, CHATML, SYSTEM[:30], SYSTEM, "Ein Vogel") == len(token_ids)


def test_a_template_that_takes_no_system_message_leaves_the_text_public_as_a_prompt() -> None:
    token_ids = tokenizer().encode_prompt(SYSTEM)
    assert num_public(token_ids, REFUSES_SYSTEM) == len(token_ids)


def test_what_a_template_wrote_an_hour_ago_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now, day = 0.0, 1

    class Calendar:
        @staticmethod
        def now() -> datetime:
            return datetime(2026, 1, day)

    monkeypatch.setattr("control_plane.text.template.datetime", Calendar)
    public = PublicPrefixes({"a.txt": SYSTEM}, clock=lambda: now)
    model, loaded = description(chat_template=DATED), tokenizer()

    def num_tokens() -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
        token_ids = loaded.encode_chat(ChatTemplate(DATED, {}), messages)
        return public.num_tokens(model, loaded, token_ids)

    whole = num_tokens()
    assert whole > 10
    day = 2
    assert num_tokens() < 10
    now = 3601.0
    assert num_tokens() == whole


def test_a_folders_texts_are_read_without_their_last_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\r\n\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "notes.md").write_text("three")
    public = PublicPrefixes.read(tmp_path)
    assert public is not None and public._texts == {"a.txt": "one\ntwo"}
    assert PublicPrefixes.read(None) is None


def test_a_folder_or_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--public-prefixes .*missing is not a folder"):
        PublicPrefixes.read(tmp_path / "missing")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidRequest, match=r"latin\.txt cannot be read"):
        PublicPrefixes.read(tmp_path)

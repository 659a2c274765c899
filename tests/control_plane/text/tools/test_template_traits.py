"""Each family's chat template is recognised by how it renders tools."""

from __future__ import annotations

from pathlib import Path

import pytest

import tandem_engine.demo
from control_plane.text.tools.forms import GENERIC, HERMES, LLAMA3, MISTRAL, ToolForm
from control_plane.text.tools.template_traits import traits_of
from tests.control_plane.text.tools import templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DEMO = (Path(tandem_engine.demo.__file__).parent / "checkpoint" / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (templates.QWEN, HERMES),
        (DEMO, HERMES),
        (templates.ARGUMENTS_AS_TEXT, HERMES),
        (templates.LLAMA, LLAMA3),
        (templates.MISTRAL, MISTRAL),
        (templates.GEMMA, GENERIC),
        (templates.CHATML_WITHOUT_TOOLS, GENERIC),
        (templates.OFFERS_ONLY, GENERIC),
    ],
    ids=["qwen", "demo", "text", "llama", "mistral", "gemma", "chatml", "unknown-form"],
)
def test_a_family_is_known_by_what_its_template_makes_of_a_call(source: str, form: ToolForm) -> None:
    traits = traits_of(source, SPECIAL)
    assert traits.form is form
    assert traits.offers_tools == traits.writes_calls == (form is not GENERIC)


def test_what_templates_want_is_found_by_asking_them() -> None:
    qwen, llama, mistral, gemma, text = (
        traits_of(source, SPECIAL)
        for source in (templates.QWEN, templates.LLAMA, templates.MISTRAL, templates.GEMMA, templates.ARGUMENTS_AS_TEXT)
    )
    assert [each.takes_several_calls for each in (qwen, llama, mistral, gemma)] == [True, False, True, True]
    assert [each.needs_short_ids for each in (qwen, llama, mistral, gemma)] == [False, False, True, False]
    assert [each.takes_results for each in (qwen, llama, mistral, gemma)] == [True, True, True, False]
    assert [each.takes_system for each in (qwen, llama, mistral, gemma)] == [True, True, True, False]
    assert [each.takes_argument_text for each in (qwen, llama, mistral, text)] == [False, False, False, True]

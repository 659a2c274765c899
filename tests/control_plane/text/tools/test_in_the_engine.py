"""The engine reads a grammar whose marker is a control token, with a real tokenizer."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from control_plane.text.tools.call_grammar import call_grammar
from control_plane.text.tools.forms import LLAMA3, MISTRAL, ToolForm
from tandem_engine.execution.grammar.guided import Guide
from tandem_engine.execution.grammar.matcher import GrammarFailed
from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
from tests.control_plane.api.model import byte_level_tokenizer
from tests.control_plane.text.tools.test_call_grammar import TOOLS
from tests.control_plane.text.tools.test_parser import written

END = 1


@pytest.fixture(scope="module", params=["by the op library's threads", "in Python"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    """What makes the masks."""
    if request.param == "in Python":
        return None
    try:
        return load_cpu_ops().library
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("form", "marker"), [(MISTRAL, "[TOOL_CALLS]"), (LLAMA3, "<|python_tag|>")])
def test_a_marker_may_be_drawn_and_calls_follow_it(
    form: ToolForm, marker: str, tmp_path: Path, library: ctypes.CDLL | None
) -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens([marker])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    marker_id: Any = tokenizer.token_to_id(marker)
    guide = Guide(tmp_path / "tokenizer.json", tokenizer.get_vocab_size(), [END], library)
    grammar = call_grammar(form, TOOLS, {marker: marker_id})
    call = written(form, [("get", '{"city": "Oslo"}')]).removeprefix(marker)
    answer = [marker_id, *tokenizer.encode(call, add_special_tokens=False).ids]

    def allowed(tokens: list[int], token: int) -> bool:
        matcher = guide(grammar)()
        matcher.request_masks(tokens, [])
        if matcher.builder:
            matcher.builder.begin([matcher])
            matcher.builder.finish()
        (mask,) = matcher.masks()
        return bool(mask[token // 32] >> token % 32 & 1)

    assert all(allowed(answer[:count], token) for count, token in enumerate(answer))
    assert allowed([], END) and not allowed(answer[:1], END) and allowed(answer, END)
    with pytest.raises(GrammarFailed):
        allowed([marker_id, *tokenizer.encode("Hello", add_special_tokens=False).ids], END)

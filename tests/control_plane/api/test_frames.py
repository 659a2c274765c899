"""Frames made from a template equal newly encoded frames, byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.http.sse import ALL_FILLERS, Fillers, TextFrames, frame
from control_plane.api.openai.responses import ChatSerializer, CompletionSerializer, PromptEcho
from control_plane.text.choice import TextDelta, TextLogprobs, TokenText
from tests.control_plane.api.model import description

_TEXTS = st.text() | st.sampled_from(['"', "\\", "\n\n", "data: [DONE]", "\u2028", "😀", "\x00", '"},{"'])
_LOGPROBS = (TextLogprobs(TokenText(5, b"x", -0.5), (), 0),)


@st.composite
def deltas(draw: st.DrawFn) -> list[TextDelta]:
    """Return what some choices say in turn, each with a finish reason at its end perhaps."""
    finish: st.SearchStrategy[Literal["stop", "length"] | None] = st.sampled_from([None, None, None, "stop"])
    each = st.builds(
        TextDelta,
        st.integers(0, 2),
        _TEXTS,
        logprobs=st.sampled_from([(), (), _LOGPROBS]),
        finish_reason=finish,
    )
    return draw(st.lists(each, max_size=12))


@given(_TEXTS, st.sampled_from(ALL_FILLERS))
def test_a_template_gives_what_encoding_gives(text: str, filler: str) -> None:
    frames = TextFrames(lambda text: {"response": text, "p": filler})
    assert frames.frame(text) == frame({"response": text, "p": filler})
    assert json.loads(frames.frame(text).removeprefix(b"data: ")) == {"response": text, "p": filler}


@given(st.text(alphabet=st.sampled_from("\x0b\x0c\x1c\x85\u2028\u2029é😀…Ť\u2085") | st.characters(codec="utf-8")))
def test_no_client_finds_two_lines_in_one_event(text: str) -> None:
    whole = frame({text: text}).decode()
    assert whole.splitlines() == [whole.removesuffix("\n\n"), ""]  # as httpx and requests split them
    assert json.loads(whole.removeprefix("data: ")) == {text: text}
    assert TextFrames(lambda text: {"response": text}).frame(text).decode().splitlines()[1:] == [""]


@pytest.mark.parametrize("with_usage_chunk", [False, True])
@given(sent=deltas())
def test_a_chats_frames_are_its_chunks(with_usage_chunk: bool, sent: list[TextDelta]) -> None:
    fast, plain = (
        ChatSerializer("r-1", 'a "model"', description(), with_usage_chunk=with_usage_chunk) for _ in range(2)
    )
    plain._base["created"] = fast._base["created"]
    plain._chunk_base["created"] = fast._chunk_base["created"]
    assert [fast.frames(delta) for delta in sent] == [
        b"".join(frame(chunk) for chunk in plain.chunks(delta)) for delta in sent
    ]


@given(deltas())
def test_a_completions_frames_are_its_chunks_with_the_echo_in_the_first(sent: list[TextDelta]) -> None:
    echoes = [PromptEcho("before "), PromptEcho(), PromptEcho("third ")]
    fast, plain = (
        CompletionSerializer("r-1", "m", description(), with_usage_chunk=False, echoes=echoes) for _ in range(2)
    )
    plain._chunk_base["created"] = fast._chunk_base["created"]
    assert [fast.frames(delta) for delta in sent] == [
        b"".join(frame(chunk) for chunk in plain.chunks(delta)) for delta in sent
    ]


def test_every_filler_is_about_as_likely() -> None:
    fillers = Fillers()
    counts = Counter(fillers.next() for _ in range(36_000))
    assert set(counts) == set(ALL_FILLERS) and {len(filler) for filler in ALL_FILLERS} == set(range(1, 37))
    assert all(800 < count < 1200 for count in counts.values())  # 1000 each; six standard deviations are 190

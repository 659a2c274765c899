"""Tests the decoding of server-sent events against the HTML standard."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem_client.sse import EventDecoder


def events(*chunks: bytes) -> list[str]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def test_an_event_is_its_data_lines_joined() -> None:
    assert events(b"data: one\ndata: two\n\n") == ["one\ntwo"]


def test_lines_end_with_lf_cr_or_crlf() -> None:
    assert events(b"data: a\n\ndata: b\r\rdata: c\r\n\r\n") == ["a", "b", "c"]


def test_nothing_else_ends_a_line() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    assert events(f"data: {text}\n\n".encode()) == [text]


def test_comments_and_other_fields_are_no_data() -> None:
    assert events(b": ping\n\nevent: x\nid: 7\nretry: 10\ndata: a\n\n: ping\n\n") == ["a"]


def test_one_space_after_the_colon_is_dropped_and_only_one() -> None:
    assert events(b"data:a\n\ndata:  b\n\n") == ["a", " b"]


def test_an_event_without_its_blank_line_is_incomplete() -> None:
    assert events(b"data: a\n\ndata: b\n") == ["a"]


def test_a_byte_order_mark_is_skipped() -> None:
    assert events(b"\xef\xbb\xbfdata: a\n\n") == ["a"]


@given(st.lists(st.integers(min_value=0, max_value=60), max_size=8))
def test_where_the_network_cuts_does_not_matter(cuts: list[int]) -> None:
    stream = "data: héllo\r\n\r\n: c\r\ndata: 世\u2028界\rdata: x\r\rdata: [DONE]\n\n".encode()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert events(*chunks) == ["héllo", "世\u2028界\nx", "[DONE]"]

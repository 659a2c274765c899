"""A join token's text is read strictly, and its errors quote none of it."""

from __future__ import annotations

import pytest

from tandem_runtime.enrolment.join_token import JoinToken, encoded
from tandem_runtime.errors import InvalidRequest

SECRET = bytes(range(32))
PIN = bytes(range(32, 64))
TEXT = f"tdj1.{'ab' * 8}.{encoded(SECRET)}.{encoded(PIN)}.gateway:8644,[fe80::1]:8644"


def test_a_token_is_its_text() -> None:
    token = JoinToken.parse(f" {TEXT}\n")
    assert token == JoinToken("ab" * 8, SECRET, (PIN,), ("gateway:8644", "[fe80::1]:8644"))
    assert token.text == TEXT and token.credential == f"{'ab' * 8}.{encoded(SECRET)}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tdj1",
        TEXT.replace("tdj1", "tdj2"),
        TEXT.replace("ab" * 8, "AB" * 8),
        TEXT.replace("ab" * 8, "ab" * 7),
        TEXT.replace(encoded(SECRET), encoded(SECRET)[:-1]),
        TEXT.replace(encoded(SECRET), encoded(SECRET) + "A"),
        TEXT.replace(encoded(SECRET), encoded(SECRET)[:-1] + "9"),  # bits behind the last byte
        TEXT.replace(encoded(PIN), "+".join([encoded(PIN)] * 3)),
        TEXT.replace(encoded(PIN), ""),
        TEXT.replace("gateway:8644", "gateway"),
        TEXT.replace("gateway:8644", "gate way:8644"),
        TEXT.replace("gateway:8644", "gateway:65536"),
        TEXT.replace("gateway:8644", ",".join(["gateway:8644"] * 8)),
        TEXT + "," + "x" * 5000,
    ],
)
def test_any_other_text_is_refused_without_a_quotation(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        JoinToken.parse(text)
    assert encoded(SECRET)[:12] not in refused.value.message and "token" in refused.value.message

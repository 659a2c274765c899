"""The kinds of hostile heads and connections."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.hostile.exchange import Script, head, request
from benchmarks.hostile.maker import BODY_RATE_SECONDS, BODY_STALL_SECONDS, CHAT, HEAD_SECONDS, Kinds, Maker

CONNECTIONS = Kinds("connections")


@CONNECTIONS.kind()
def _a_giant_header(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/healthz", headers={"X-Long": "x" * (16 * make.max_body_bytes // 10)})])]


@CONNECTIONS.kind()
def _many_headers(make: Maker) -> Sequence[Script]:
    headers = {f"X-{index}": "x" for index in range(make.fill(12))}
    return [Script([request("GET", "/healthz", headers=headers)])]


@CONNECTIONS.kind(HEAD_SECONDS)
def _a_head_without_end(make: Maker) -> Sequence[Script]:
    more = b"X-More: xxxxxxxx\r\n" * 4096
    return [Script([b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", *([more] * 40)])]


@CONNECTIONS.kind()
def _a_giant_url(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/v1/models?x=" + "x" * (8 * make.max_body_bytes // 10))])]


@CONNECTIONS.kind()
def _a_long_query(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/v1/models?" + "a=1&" * 3_000, token=make.token)])]


@CONNECTIONS.kind(HEAD_SECONDS)
def _half_a_head(make: Maker) -> Sequence[Script]:
    return [Script([b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Half:"])] * 40


@CONNECTIONS.kind(HEAD_SECONDS)
def _a_head_byte_by_byte(make: Maker) -> Sequence[Script]:
    steps: list[bytes | float] = []
    for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 200:
        steps += [bytes([byte]), 0.25]
    return [Script(steps)] * 10


@CONNECTIONS.kind(BODY_STALL_SECONDS)
def _a_body_that_never_comes(make: Maker) -> Sequence[Script]:
    start = head("POST", CHAT, {"Content-Length": "5000000"}, make.token)
    return [Script([start + b'{"model":'])] * 20


@CONNECTIONS.kind(BODY_RATE_SECONDS)
def _a_body_byte_by_byte(make: Maker) -> Sequence[Script]:
    steps: list[bytes | float] = [head("POST", CHAT, {"Content-Length": "100000"}, make.token)]
    for _ in range(600):
        steps += [b" ", 0.1]
    return [Script(steps)] * 20


@CONNECTIONS.kind()
def _a_promise_of_too_much(make: Maker) -> Sequence[Script]:
    return [Script([head("POST", CHAT, {"Content-Length": "999999999999"}, make.token)])]


@CONNECTIONS.kind()
def _a_promise_that_is_no_number(make: Maker) -> Sequence[Script]:
    return [Script([head("POST", CHAT, {"Content-Length": "1e9"}, make.token) + b"{}"])]


@CONNECTIONS.kind()
def _length_and_chunks(make: Maker) -> Sequence[Script]:
    both = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
    return [Script([head("POST", CHAT, both, make.token) + b"0\r\n\r\n"])]


def _chunked(make: Maker, body: bytes) -> Sequence[Script]:
    return [Script([head("POST", CHAT, {"Transfer-Encoding": "chunked"}, make.token) + body])]


@CONNECTIONS.kind()
def _chunks_of_one_byte(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"1\r\n \r\n" * make.fill(6) + b"0\r\n\r\n")


@CONNECTIONS.kind()
def _long_chunk_extensions(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"1;" + b"x" * make.fill(1) + b"\r\n{\r\n0\r\n\r\n")


@CONNECTIONS.kind()
def _a_chunk_of_no_size(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"zz\r\n{}\r\n0\r\n\r\n")


@CONNECTIONS.kind(BODY_STALL_SECONDS)
def _a_chunk_of_all_sizes(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"f" * 15 + b"\r\n{}")


@CONNECTIONS.kind()
def _long_trailers(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"2\r\n{}\r\n0\r\n" + b"X-After: xxxxxxxxxxxxxxxx\r\n" * make.fill(27) + b"\r\n")


@CONNECTIONS.kind(BODY_STALL_SECONDS)
def _chunks_without_end(make: Maker) -> Sequence[Script]:
    return _chunked(make, (b"10000\r\n" + b" " * 65_536 + b"\r\n") * (2 * make.max_body_bytes // 65_536 + 1))


@CONNECTIONS.kind()
def _a_thousand_pipelined_requests(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/v1/models", token=make.token) * 1000])]


@CONNECTIONS.kind()
def _pipelined_half_and_whole(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/healthz") + b"GET /healthz HTTP/1.1\r\nHo"])]


@CONNECTIONS.kind()
def _no_http(make: Maker) -> Sequence[Script]:
    return [Script([b"\x16\x03\x01" + make.chance.randbytes(2000) + b"\r\n\r\n"])]


@CONNECTIONS.kind(HEAD_SECONDS)
def _many_connections_that_say_nothing(make: Maker) -> Sequence[Script]:
    return [Script([b""])] * 200


@CONNECTIONS.kind()
def _a_hundred_at_once(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/")])] * 100


@CONNECTIONS.kind()
def _an_expectation_of_nothing(make: Maker) -> Sequence[Script]:
    wanted = {"Expect": "100-continue", "Content-Length": "999999999"}
    return [Script([head("POST", CHAT, wanted, make.token)])]

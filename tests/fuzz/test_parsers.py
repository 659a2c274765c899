"""Every byte parser refuses or takes every input: no crash, no hang, no accepted forgery, no lost descriptor."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from kv_transfer_svc.transport import frames
from kv_transfer_svc.transport.handshake import DataTokens
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.kv.signatures import HandleVerifier
from tests.fuzz.mutation import mutations
from tests.fuzz.names import MODULES
from tests.fuzz.parsers import PARSERS

_CORPUS = Path(__file__).with_name("corpus")
_NUM_INPUTS = 800
_MAX_SECONDS = 0.4
_HANG_SECONDS = 2.0


def test_every_parser_that_is_fuzzed_has_its_modules_and_seeds() -> None:
    assert list(PARSERS) == list(MODULES)
    assert all(parser.seeds() for parser in PARSERS.values())


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_holds_its_laws_for_every_input(name: str) -> None:
    """The seeds, the inputs that fuzzing found, then changes of both: the same ones in every run, until time is up."""
    parser = PARSERS[name]
    found = [path.read_bytes() for path in sorted((_CORPUS / name).glob("*"))]
    seeds = [*parser.seeds(), *found]
    for data in seeds:
        _feed(name, data)
    deadline = time.monotonic() + _MAX_SECONDS
    for data in itertools.islice(mutations(seeds, seed=len(name)), _NUM_INPUTS):
        _feed(name, data)
        if time.monotonic() > deadline:
            break


def _feed(name: str, data: bytes) -> None:
    began = time.thread_time()
    try:
        PARSERS[name].feed(data)
    except BaseException as error:
        error.add_note(f"{name} was fed {data!r}")
        raise
    assert time.thread_time() - began < _HANG_SECONDS, f"{name} computed too long on {data!r}"


def test_the_laws_notice_an_accepted_forgery(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a run without a finding means something."""
    forged = kv.DataRequest(incarnation="holder-1", token=b"x" * 24)
    monkeypatch.setattr(DataTokens, "verify", lambda self, request: None)
    with pytest.raises(AssertionError, match="the forged token"):
        PARSERS["link_requests"].feed(frames.packed(forged))
    monkeypatch.setattr(HandleVerifier, "verify", lambda self, handle: None)
    with pytest.raises(AssertionError, match="the forgery"):
        PARSERS["handles"].feed(b"\x10\x01")


def test_mutations_are_the_same_for_the_same_seed() -> None:
    seeds = [b"abc", b"defg" * 20]
    first, second, other = (list(itertools.islice(mutations(seeds, seed), 50)) for seed in (1, 1, 2))
    assert first == second != other

"""RequestState is the only writer of a request's state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from control_plane import dispatch
from control_plane.dispatch.request_state import ChoiceState, RequestState
from control_plane.dispatch.worker_call import WorkerCall
from tandem.v1 import types_pb2 as pb
from tandem_runtime.virtual_counters import AnswerMeter, VirtualCounters
from tests.control_plane.dispatch.test_request_stream import PROMPT, new_stream

_MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "update"}


def writes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that a module sets or changes on other objects than `self`."""
    for node in ast.walk(tree):
        target: ast.AST = node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            target = node.func.value
        elif not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)):
            continue
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
            yield target.attr


def test_nothing_else_writes_the_state_of_a_request() -> None:
    state = new_stream().state
    owned = {name.lstrip("_") for name in vars(state)} | {field.name for field in fields(ChoiceState)}
    owned |= {field.name for field in fields(WorkerCall)}
    owned -= {"choice_index"}  # constant in a call; also a field of the Submit message
    assert {"tokens", "attempt", "avoid", "is_over", "answered"} <= owned
    (folder,) = dispatch.__path__
    for path in Path(folder).glob("*.py"):
        if path.stem != RequestState.__module__.rpartition(".")[2]:
            found = {name.lstrip("_") for name in writes(ast.parse(path.read_text()))}
            assert not found & owned, f"{path.name} writes {found & owned}"


def output(first: int, end: int) -> pb.TokenOutput:
    return pb.TokenOutput(position=len(PROMPT) + first, token_ids=range(first, end))


def test_an_account_is_charged_for_some_tokens_at_once_and_for_the_rest_at_the_end() -> None:
    """The first token of each answer came before the request had started."""
    state, counters = new_stream(num_choices=2).state, VirtualCounters()
    for choice in state.choices:
        state.receive(choice, output(0, 1))
    state.charge_to(AnswerMeter(lambda num: counters.charge("me", num), 4.0))
    first, second = state.choices
    state.receive(first, output(1, 16))
    state.receive(second, output(1, 4))
    assert counters.of("me") == 0
    state.receive(first, output(16, 18))
    assert counters.of("me") == 17 - 4, "four were paid for"
    state.settle()
    assert counters.of("me") == 17 + 3 - 4
    state.settle()
    assert counters.of("me") == 17 + 3 - 4


def test_what_was_charged_in_advance_and_has_not_come_is_given_back_when_a_request_ends() -> None:
    state, counters = new_stream().state, VirtualCounters()
    counters.charge("me", 100.0)
    state.charge_to(AnswerMeter(lambda num: counters.charge("me", num), 50.0))
    state.receive(state.choices[0], output(0, 3))
    state.settle()
    assert counters.of("me") == 100.0 - 47.0

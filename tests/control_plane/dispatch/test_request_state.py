"""RequestState is the only writer of a request's state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from control_plane import dispatch
from control_plane.dispatch.request_state import ChoiceState, RequestState
from control_plane.dispatch.worker_call import WorkerCall
from tests.control_plane.dispatch.test_request_stream import new_stream

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

"""Is the code of a module of transformers one whose arithmetic we know?

transformers' families are copies of each other's code, so that a few texts are those of most. Each is known by a digest
of its text, without comments, docstrings and annotations: another version's change, however small, makes it unknown.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


def digest_of_method(module: Any, name: str) -> str:
    """Return the digest of the text of the class's own method; "" where it has none, or the object's is another."""
    function = getattr(type(module), name, None)
    return "" if name in vars(module) or not inspect.isfunction(function) else digest_of(function)


@cache
def digest_of(function: Callable[..., Any]) -> str:
    """Return the digest of a function's text, decorators included; "" where the text is not to be had.

    Nor is it where a function wraps another: the text is the inner one's then.
    """
    if hasattr(function, "__wrapped__"):
        return ""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError:  # installed without its sources
        return ""
    definition = ast.parse(text).body[0]
    if not isinstance(definition, ast.FunctionDef):
        return ""
    return hashlib.blake2b(ast.unparse(_bare(definition)).encode(), digest_size=8).hexdigest()


def _bare(definition: ast.FunctionDef) -> ast.FunctionDef:
    definition.returns = None
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:] or [ast.Pass()]
    return definition

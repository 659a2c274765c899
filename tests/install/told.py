"""Prints the steps of a way to install, and what was measured."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from infra.kubernetes.tools import MissingTool


def all_held(run: Callable[[], None], *programs: str) -> int:
    """Run a way's steps; return 0, or 1 with the reason: a program that is missing, or what did not hold."""
    if missing := [each for each in programs if shutil.which(each) is None]:
        print(f"missing: {', '.join(missing)}; run `make services`", file=sys.stderr)
        return 1
    try:
        run()
    except (AssertionError, MissingTool, pytest.skip.Exception) as error:
        print(f"did not hold: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def told(step: str) -> Iterator[None]:
    """Print a step, with its seconds when it has held."""
    began = time.monotonic()
    print(f"  {step} ...", flush=True)
    yield
    print(f"  {step}: held, {time.monotonic() - began:.1f} s", flush=True)


def say(what: str) -> None:
    print(f"    {what}", flush=True)

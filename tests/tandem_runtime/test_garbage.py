"""Full collections look once at what lives, and at all again when too much is excluded."""

from __future__ import annotations

import subprocess
import sys
import textwrap

_BODY = """
import gc, weakref
from tandem_runtime.garbage import forget_what_is_loaded, look_once_at_what_lives

class Node:
    def __init__(self):
        self.itself = self

def fresh():
    return weakref.ref(Node())

def say(*facts):
    print(*facts)

forget_what_is_loaded()
look_once_at_what_lives()
num_loaded = gc.get_freeze_count()
kept = [[] for _ in range(1000)]

first = fresh()
gc.collect()
say(first() is not None, gc.get_freeze_count() >= num_loaded + 1000, "the first one looks at nothing")

later, node = fresh(), Node()
old = weakref.ref(node)
gc.collect()
say(later() is None, old() is not None, "the next one looks at what is new, and excludes what lives")

del node
for _ in range(6):
    gc.collect()
say(old() is not None, first() is not None, "what was excluded stays as a cycle, while the excluded are not many more")

kept += [[] for _ in range(num_loaded)]
for _ in range(7):
    gc.collect()
say(old() is not None, gc.get_freeze_count() > 1.5 * num_loaded, "excluded are half as many again")

gc.collect()
gc.collect()
say(old() is None, first() is None, "then all are looked at")

del kept[:]
say(gc.get_freeze_count() < 1.2 * num_loaded, True, "an excluded object is freed with its last reference")
"""


def test_a_full_collection_looks_at_what_is_new_and_at_all_once_the_excluded_are_half_as_many_again() -> None:
    code = textwrap.dedent(_BODY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6
    assert [line for line in done.stdout.splitlines() if not line.startswith("True True ")] == []

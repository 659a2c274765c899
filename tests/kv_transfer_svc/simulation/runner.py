"""Runs one seed from start to rest, and sums up what all runs covered."""

from __future__ import annotations

import random
from collections import Counter

from tandem_runtime.kv_handle import HandleState
from tests.kv_transfer_svc.simulation.harness import ACTIONS, new_harness
from tests.kv_transfer_svc.simulation.truth import Truth, Violation
from tests.kv_transfer_svc.simulation.watched_machine import WANTED


def run_seed(seed: int, num_steps: int, totals: Totals) -> None:
    """Run one seed with random actions until rest; raises Violation."""
    driver = random.Random(~seed)
    names, weights = list(ACTIONS), list(ACTIONS.values())
    with new_harness(seed) as harness:
        try:
            for _ in range(num_steps):
                action = driver.choices(names, weights)[0]
                totals.actions[action] += 1
                harness.truth.note(f"-- {action}")
                getattr(harness, action)()
                harness.run(driver.choice([0.0, 0.002, 0.02, 0.1]))
            harness.come_to_rest()
        except Violation as violation:
            _report(seed, violation, harness.truth)
            raise
        finally:
            totals.add(harness.truth, harness.loop.time(), harness.loop.num_events)


class Totals:
    """Counts over all runs."""

    def __init__(self) -> None:
        self.actions: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.edges: Counter[tuple[str, HandleState, HandleState]] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.virtual_seconds = 0.0
        self.num_events = 0

    def add(self, truth: Truth, virtual_seconds: float, num_events: int) -> None:
        self.counts += truth.counts
        self.edges += truth.edges
        self.refusals += truth.refusals
        self.virtual_seconds += virtual_seconds
        self.num_events += num_events

    @property
    def missing(self) -> list[str]:
        """Edges of the state machine that were never taken."""
        return [
            f"{edge}: {before.name} -> {after.name}"
            for edge, (before, after) in WANTED
            if not self.edges[edge, before, after]
        ]

    def print(self) -> None:
        _print("actions", self.actions)
        _print("faults and what became of requests", self.counts)
        edges = {f"{edge}: {before.name} -> {after.name}": n for (edge, before, after), n in self.edges.items()}
        _print("edges of the handle's machine", Counter(edges))
        _print(
            "refused, changing nothing", Counter({f"{edge}: {error}": n for (edge, error), n in self.refusals.items()})
        )


def _report(seed: int, violation: Violation, truth: Truth) -> None:
    print(f"\nVIOLATED in the run of seed {seed}: {violation}\nthe last events:")
    for event in truth.events:
        print("  " + event)
    print(f"repeat: python -m tests.kv_transfer_svc.simulation --seed {seed} --runs 1")


def _print(title: str, counts: Counter[str]) -> None:
    print(f"\n{title}")
    for name, number in sorted(counts.items()):
        print(f"  {number:9d}  {name}")

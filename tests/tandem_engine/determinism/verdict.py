"""Compares tokens, log probabilities and logits' bits of each way with those of each request alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tandem_engine.models.loader import LoadedModel
from tests.tandem_engine.determinism.recording import Journal
from tests.tandem_engine.determinism.request_specs import RequestSpec, random_specs
from tests.tandem_engine.determinism.stage import Stage, loaded
from tests.tandem_engine.determinism.ways import ALONE, WAYS, Way

_MAX_NAMED = 8
_COLUMNS = ("requests", "tokens", "rows compared", "differences", "proof", "seconds")


@dataclass
class Line:
    """The result of one way, for one model or several."""

    way: str
    requests: int = 0
    tokens: int = 0
    rows: int = 0
    """Rows of logits whose bits were compared."""
    differences: list[str] = field(default_factory=list)
    proof: str = ""
    proof_count: int = 0
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.differences and self.proof_count > 0 and self.rows >= self.tokens > 0

    def add(self, other: Line) -> None:
        """Add another model's line."""
        self.proof = other.proof
        for name in ("requests", "tokens", "rows", "proof_count", "seconds", "differences"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def compare_all(model: LoadedModel, num_requests: int, seed: int, ways: Sequence[Way] = WAYS) -> Iterator[Line]:
    """Run the same random requests in every way; yield one line per way. "alone" is first, and runs twice."""
    rng = random.Random(seed)
    specs = random_specs(rng, num_requests, model.info.vocab_size, model.info.context_length)
    expected, _ = _run(model, ALONE, specs, rng)
    for way in (ALONE, *ways):
        journal, seconds = _run(model, way, specs, rng)
        yield _line(way, specs, expected, journal, seconds)


def judge(
    models: Sequence[str], num_requests: int, seed: int, folder: Path, say: Callable[[str], None]
) -> dict[str, dict[str, Line]]:
    """Return the lines by model and way; the requests are divided among the models."""
    lines: dict[str, dict[str, Line]] = {}
    for number, name in enumerate(models):
        share = num_requests * (number + 1) // len(models) - num_requests * number // len(models)
        lines[name] = {}
        for line in compare_all(loaded(name, folder), share, seed + number):
            lines[name][line.way] = line
            say(f"{name}: {line.way}: {line.requests} requests, {line.rows} rows, {len(line.differences)} differences")
    return lines


def totals(lines: dict[str, dict[str, Line]]) -> list[Line]:
    """Return one line per way, all models together."""
    summed: dict[str, Line] = {}
    for model, by_way in lines.items():
        for way, line in by_way.items():
            named = [f"{model}: {difference}" for difference in line.differences]
            summed.setdefault(way, Line(way)).add(Line(**asdict(line) | {"differences": named}))
    return list(summed.values())


def table(lines: Sequence[Line]) -> list[str]:
    """Return a Markdown table, and the first differences."""
    rows = [("way", *_COLUMNS), ("---", *["---:"] * len(_COLUMNS))]
    rows += [
        (
            line.way,
            *(f"{count:,}" for count in (line.requests, line.tokens, line.rows, len(line.differences))),
            f"{line.proof_count:,} {line.proof.replace('_', ' ')}",
            f"{line.seconds:.0f}",
        )
        for line in lines
    ]
    named = [f"{line.way}: {each}" for line in lines for each in line.differences[:_MAX_NAMED]]
    return [*("| " + " | ".join(row) + " |" for row in rows), *named]


def _run(model: LoadedModel, way: Way, specs: Sequence[RequestSpec], rng: random.Random) -> tuple[Journal, float]:
    journal = Journal(frozenset(spec.request_id for spec in specs))
    stage = Stage(model, random.Random(f"{way.name} {rng.getrandbits(64)}"), journal)
    started = time.perf_counter()
    way.run(stage, specs)
    return journal, time.perf_counter() - started


def _line(way: Way, specs: Sequence[RequestSpec], expected: Journal, journal: Journal, seconds: float) -> Line:
    line = Line(way.name, len(specs), proof=way.proof, proof_count=journal.counters[way.proof], seconds=seconds)
    line.differences += journal.conflicts
    line.tokens = len(journal.tokens)
    for place in sorted(expected.tokens.keys() | journal.tokens.keys()):
        line.rows += place in journal.rows
        line.differences += _differences(place, expected, journal)
    return line


def _differences(place: tuple[str, int], expected: Journal, journal: Journal) -> list[str]:
    where = f"{place[0]}, token {place[1]}"
    if place not in journal.rows or expected.rows.get(place) != journal.rows[place]:
        return [f"{where}: other logits"]
    if expected.tokens.get(place) != journal.tokens.get(place):
        return [f"{where}: {journal.tokens.get(place)} where it was {expected.tokens.get(place)} alone"]
    return []

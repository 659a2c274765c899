"""Provides the runner that replaces the model in tests of the scheduler.

Its tokens are a pure function of position and choice, so a reader can predict them, and a request that was preempted or
imported must answer the same. Its KV is the hash of all tokens up to a position: a step that reads a slot with any
other content fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem_engine.core import EngineCore, RequestsFailed, Ticket
from tandem_engine.errors import RegionError
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import (
    AddRequest,
    EngineEvent,
    ExtentRef,
    ImportSlab,
    MapRegion,
    Mode,
    PrefixBlock,
    RequestOutput,
    StepDone,
)
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.block_hash import BlockHash, hash_blocks, hash_root
from tandem_engine.scheduling.request import Request, Sampled
from tandem_engine.scheduling.scheduler import ScheduledRun, SchedulerOutput
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_engine.scheduling.speculation.drafters import Drafter

ROOT = hash_root(b"model", 4)
STOP = 99


@dataclass(frozen=True)
class FakeTicket:
    """A step that runs as long as its runner says so; the block tables at its launch."""

    runner: FakeRunner
    output: SchedulerOutput
    tables: list[list[list[int]]]

    @property
    def is_running(self) -> bool:
        return self.runner.is_busy


class FakeRunner:
    """Implements all of `Runner` without computing. Records each step as (id, first, number of tokens)."""

    def __init__(self, num_blocks: int, window: int | None = None, group_window: int | None = None) -> None:
        self.window = window
        self.group_window = group_window
        """Of all tables but the first."""
        self.seconds = 0.0
        """Simulated time of all steps so far."""
        self.step_seconds: Callable[[SchedulerOutput], float] = lambda output: 0.0
        self.generations = array("Q", bytes(8 * num_blocks))
        self.steps: list[list[tuple[str, int, int]]] = []
        self.imported: list[tuple[int, int]] = []
        self.copy_seconds = 0.0
        """Simulated time of one block's copy."""
        self.prepare_seconds: dict[str, float] = {}
        """Simulated time of a request's arrival, by request id."""
        self.regions: dict[str, int] = {}
        self.stop_positions: set[int] = set()
        self.breaks_with: Exception | None = None
        self.breaks_when_sampling: Exception | None = None
        self.stale_slots: set[int] = set()
        self.unmappable_regions: set[str] = set()
        self.remote: dict[int, list[int | None]] = {}  # slot -> KV of its four tokens; slots not in it are trusted
        self.is_busy = False
        """Whether launched steps still run."""
        self.unready: set[str] = set()
        """Requests whose next token cannot be sampled yet."""
        self._kv: list[list[int | None]] = [[0] * 4 for _ in range(num_blocks)]

    def prepare(self, request: Request) -> bool:
        self.seconds += self.prepare_seconds.pop(request.request_id, 0.0)
        return request.request_id not in self.unready

    @property
    def wake_fd(self) -> int | None:
        return None

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> FakeTicket:
        self._check(output)
        if error := self.breaks_with:
            self.breaks_with = None
            raise error
        self._read_and_write(output)
        self.seconds += self.step_seconds(output)
        kv_written()
        tables = [[[*table] for table in run.request.tables] for run in output.runs]
        return FakeTicket(self, output, tables)

    def collect(self, ticket: Ticket) -> dict[str, list[Sampled]]:
        """Sample; asserts that nobody has touched the blocks of the step since its launch."""
        assert isinstance(ticket, FakeTicket)
        output = ticket.output
        self._check(output)
        for run, tables in zip(output.runs, ticket.tables, strict=True):
            for group, (table, before) in enumerate(zip(run.request.tables, tables, strict=True)):
                assert table[: len(before)] == before, "blocks were taken from a running step"
                expected = kv_of([*run.request.token_ids[: run.end], *run.draft_tokens], group)
                for position in range(run.first_position, run.end + len(run.draft_tokens)):
                    assert self._kv[table[position // 4]][position % 4] == expected[position], "a block was overwritten"
        if error := self.breaks_when_sampling:
            self.breaks_when_sampling = None
            raise error
        self.steps.append([(run.request.request_id, run.first_position, run.num_tokens) for run in output.runs])
        return {run.request.request_id: self._sample(run) for run in output.runs if run.samples}

    def close(self) -> None:
        pass

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        for block, extent in zip(blocks, extents, strict=True):
            if extent.slot in self.stale_slots:
                raise RegionError(f"slot {extent.slot} of {extent.region_id} was handed out again")
            self.imported.append((extent.slot, block))
            self.seconds += self.copy_seconds
            self._kv[block] = list(self.remote.get(extent.slot, [None] * 4))
        return sum(extent.num_bytes for extent in extents)

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        for of_extent, extent in zip(parts, extents, strict=True):
            if extent.slot in self.stale_slots:
                raise RegionError(f"slot {extent.slot} of {extent.region_id} was handed out again")
            self.seconds += self.copy_seconds
            for block, first, source_first, num_tokens in of_extent:
                source = self.remote[extent.slot][source_first : source_first + num_tokens]
                assert len(source) == num_tokens and extent.num_bytes == layout.bytes_per_block
                self._kv[block][first : first + num_tokens] = source
                assert len(self._kv[block]) == 4, "tokens beyond the end of a block"
        return sum(extent.num_bytes for extent in extents)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return []

    def map_region(self, command: MapRegion, *fds: int) -> None:
        if command.region_id in self.unmappable_regions:
            raise RegionError(f"region {command.region_id} is shorter than it says")
        (self.regions[command.region_id],) = fds

    def unmap_region(self, region_id: str) -> None:
        del self.regions[region_id]

    def _sample(self, run: ScheduledRun) -> list[Sampled]:
        token_id = self.token_at(run.request.num_tokens)
        sampled = [Sampled(token_id + 100 * choice) for choice in range(len(run.request.choice_seeds))]
        for position, draft in enumerate(run.draft_tokens, run.request.num_tokens):
            if draft != self.token_at(position):
                break
            sampled.append(Sampled(self.token_at(position + 1)))
        return sampled

    def token_at(self, position: int) -> int:
        """Return the token sampled at a position, for the first choice."""
        return STOP if position in self.stop_positions else 1000 + position

    def _read_and_write(self, output: SchedulerOutput) -> None:
        for run in output.runs:
            for group, table in enumerate(run.request.tables):
                expected = kv_of(run.request.token_ids, group)
                window = self.group_window if group else self.window
                for position in range(visible_from(run.first_position, window), run.first_position):
                    found = self._kv[table[position // 4]][position % 4]
                    assert found in (None, expected[position]), f"{run.request.request_id} reads a wrong slot"
        for run in output.runs:
            for group, table in enumerate(run.request.tables):
                expected = kv_of([*run.request.token_ids[: run.end], *run.draft_tokens], group)
                for position in range(run.first_position, run.end + len(run.draft_tokens)):
                    self._kv[table[position // 4]][position % 4] = expected[position]

    def _check(self, output: SchedulerOutput) -> None:
        written: list[int] = []
        for run in output.runs:
            end = run.end + len(run.draft_tokens)
            assert run.num_tokens > 0
            assert run.first_position == run.request.num_computed_tokens
            assert run.samples == (run.end == run.request.num_tokens)
            assert not run.draft_tokens or (run.is_decode and run.request.mode != "prefill")
            for table in run.request.tables:
                assert end <= len(table) * 4, "tokens without a slot"
                written += table[run.first_position // 4 : (end - 1) // 4 + 1]
        assert len(written) == len(set(written)), "two requests write one block"


class EngineHarness:
    """Runs an engine core with blocks of 4 tokens, with the few calls that tests need."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        context_length: int = 64,
        max_num_batched_tokens: int = 32,
        max_num_seqs: int = 8,
        max_num_waiting: int = 8,
        max_prefill_tokens_with_decodes: int = 64,
        max_prefill_context_with_decodes: int = 1 << 20,
        window: int | None = None,
        num_window_groups: int | None = None,
        group_window: int | None = None,
        step_seconds: Callable[[SchedulerOutput], float] | None = None,
        max_draft_tokens: int = 0,
        drafter: Drafter | None = None,
        overlaps: bool = False,
    ) -> None:
        """With `step_seconds` time is simulated: it passes only while steps run.

        With `max_draft_tokens` answers have drafts, from `drafter` alone if it is given.
        """
        self.clock_error_seconds = 0.0
        self.runner = FakeRunner(num_blocks, window, group_window)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=4,
            context_length=context_length,
            vocab_size=10_000,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            max_prefill_tokens_with_decodes=max_prefill_tokens_with_decodes,
            max_prefill_context_with_decodes=max_prefill_context_with_decodes,
            window=window,
            max_draft_tokens=max_draft_tokens,
            num_window_groups=num_window_groups,
            group_window=group_window,
        )
        if step_seconds is None:
            self.core = EngineCore(config, self.runner, overlaps=overlaps)
        else:
            runner = self.runner
            runner.step_seconds = step_seconds
            wall = lambda: 1 + int((runner.seconds + self.clock_error_seconds) * 1e9)  # noqa: E731
            self.core = EngineCore(config, runner, wall, lambda: 1 + int(runner.seconds * 1e9), overlaps=overlaps)
        self.pool = self.core.scheduler.pool
        if drafter is not None:
            self.core.scheduler.speculator.use([drafter])

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        mode: Mode = "aggregated",
        root: BlockHash | None = None,
        num_prompt_tokens: int | None = None,
        choice_seeds: Sequence[int] = (),
        priority: int = 0,
        fairness_key: str = "",
        choice_of: str = "",
        attempt: int = 0,
        prefix: Mapping[int, int] | Sequence[PrefixBlock] = (),
        max_found_blocks: int | None = None,
        max_left_blocks: int | None = None,
    ) -> list[EngineEvent]:
        """Add a request; `prefix` maps block indices of the prompt to remote slots that hold them."""
        if isinstance(prefix, Mapping):
            prefix = [PrefixBlock(index, extent(slot)) for index, slot in prefix.items()]
        command = AddRequest(
            request_id=request_id,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt) if num_prompt_tokens is None else num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
            mode=mode,
            hash_root=root.hex() if root else "",
            block_hashes=[block_hash.hex() for block_hash in hash_blocks(root, prompt, 4)] if root else [],
            prefix=list(prefix),
            max_found_blocks=max_found_blocks,
            max_left_blocks=max_left_blocks,
            choice_seeds=list(choice_seeds),
            priority=priority,
            fairness_key=fairness_key,
            choice_of=choice_of,
            attempt=attempt,
        )
        return self.core.handle(command)

    def step(self, emit: Callable[[EngineEvent], None] | None = None) -> StepDone:
        done = self.core.step(emit)
        self.pool.check()
        assert self.pool.num_blocks == self.pool.num_free + self.pool.num_cached + self.pool.num_used
        return done

    def turn(self) -> list[EngineEvent]:
        """Do what the process does in one turn of its loop, with overlap; return the events."""
        events: list[EngineEvent] = []
        self.core.run_step(events.append)
        self.pool.check()
        return events

    def last_runs(self) -> list[tuple[str, int, int]]:
        """Return the runs of the last step: (request id, first position, number of tokens)."""
        return self.runner.steps[-1]

    def run(self) -> list[RequestOutput]:
        """Step until no work is left; return all outputs."""
        outputs: list[RequestOutput] = []
        while self.core.has_work():
            outputs += self.step().outputs
        return outputs

    def counter(self, name: str) -> float:
        return self.core.scheduler.stats().counters[name]

    def assert_nothing_is_left(self) -> None:
        self.pool.check()
        stats = self.core.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_tokens_in_flight) == (0, 0, 0)
        assert (stats.num_used_blocks, stats.num_held_blocks) == (0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks
        assert not self.core.has_work()


def visible_from(position: int, window: int | None) -> int:
    """Return the first position that the token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def kv_of(token_ids: Sequence[int], group: int = 0) -> list[int | None]:
    """Return the fake keys and values of each token in one group's layers."""
    return [hash((group, *token_ids[: end + 1])) for end in range(len(token_ids))]


def slab(request_id: str, first_block: int, slots: Sequence[int], slab_index: int = 0, group: int = 0) -> ImportSlab:
    return ImportSlab(request_id, slab_index, first_block, [extent(slot) for slot in slots], group)


def extent(slot: int, num_bytes: int = 100) -> ExtentRef:
    return ExtentRef("prefill", slot * num_bytes, num_bytes, slot, 1)


def tokens_of(outputs: Sequence[RequestOutput], request_id: str) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]


__all__ = ["ROOT", "STOP", "EngineHarness", "FakeRunner", "RequestsFailed", "extent", "kv_of", "slab", "tokens_of"]

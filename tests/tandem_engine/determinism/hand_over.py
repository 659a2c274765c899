"""Runs a pair of engines: one computes the prompt, the other the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tandem_engine.messages import (
    AbortRequest,
    ExtentRef,
    ImportSlab,
    Recompute,
    ReleaseHeld,
    ReleaseSlabs,
    SealedBlocks,
    SlabImported,
    StartDecode,
    StepDone,
)
from tests.tandem_engine.determinism.request_specs import RequestSpec
from tests.tandem_engine.determinism.stage import Engine, Stage


class Pair:
    """A prefill engine and a decode engine that reads its blocks. Slabs arrive late, in any order; some are lost.

    Blocks that were copied, or lost, are released at once, as far as all before them were.
    """

    def __init__(self, stage: Stage, prefill: Engine, decode: Engine, loss: float = 0.0) -> None:
        self.prefill = prefill
        self.decode = decode
        self._rng = stage.rng
        self._loss = loss
        self._block_bytes = stage.model.geometry.bytes_per_block
        self._slabs_in_flight: list[ImportSlab] = []
        self._slabs: dict[str, list[ImportSlab]] = {}
        """All slabs of a request, in the order of their announcement."""
        self._done: dict[str, set[int]] = {}
        """Their indices, of those that have arrived or are lost."""
        self._complete: set[str] = set()
        """Requests of which every slab was announced."""
        self._lost: set[str] = set()
        self._first_tokens: dict[str, list[int]] = {}
        prefill.lend_to(decode)

    def add(self, spec: RequestSpec, answer: Sequence[int] = ()) -> None:
        """Add a request to both engines; decode reserves its blocks."""
        self.decode.add(spec, answer, "decode")
        self.prefill.add(spec, answer, "prefill")

    @property
    def has_work(self) -> bool:
        return bool(self.prefill.has_work or self._slabs_in_flight or self._first_tokens or self.decode.has_work)

    def step(self) -> None:
        """Run one step of each engine; some slabs arrive between the steps."""
        if self.prefill.has_work:
            self._step_prefill()
        self._rng.shuffle(self._slabs_in_flight)
        for _ in range(self._rng.randint(0, len(self._slabs_in_flight))):
            self._import(self._slabs_in_flight.pop())
        for request_id in [*self._first_tokens]:
            is_under_way = any(slab.request_id == request_id for slab in self._slabs_in_flight)
            if request_id in self._complete and not is_under_way:
                self._start(request_id)
        if self.decode.has_work:
            self.decode.step()

    def _step_prefill(self) -> None:
        done, sealed = self.prefill.step()
        self._announced(sealed)
        for output in done.outputs:
            if output.finish_reason is None:
                self._first_tokens[output.request_id] = output.token_ids
            else:
                self._forget(output.request_id)

    def _announced(self, sealed: Sequence[SealedBlocks]) -> None:
        for event in sealed:
            self._slabs_in_flight += self._cut(event)
            if event.is_last:
                self._complete.add(event.request_id)

    def _tell_prefill(self, command: ReleaseHeld | ReleaseSlabs) -> None:
        for event in self.prefill.core.handle(command):
            assert isinstance(event, StepDone)
            self._announced(event.sealed)

    def _cut(self, sealed: SealedBlocks) -> list[ImportSlab]:
        """Cut sealed blocks into slabs of random sizes."""
        size = self._block_bytes
        extents = [
            ExtentRef(sealed.region_id, slot * size, size, slot, generation)
            for slot, generation in zip(sealed.slots, sealed.generations, strict=True)
        ]
        slabs: list[ImportSlab] = []
        known = self._slabs.setdefault(sealed.request_id, [])
        start = 0
        while start < len(extents):
            end = start + self._rng.randint(1, len(extents) - start)
            first = sealed.first_block + start
            slabs.append(ImportSlab(sealed.request_id, len(known), first, extents[start:end], sealed.group))
            known.append(slabs[-1])
            start = end
        return slabs

    def _import(self, slab: ImportSlab) -> None:
        if self._rng.random() < self._loss:
            self._lost.add(slab.request_id)
        else:
            (imported,) = self.decode.core.handle(slab)
            assert isinstance(imported, SlabImported) and not imported.error, imported
        done = self._done.setdefault(slab.request_id, set())
        done.add(slab.slab_index)
        leading = takewhile(lambda each: each.slab_index in done, self._slabs[slab.request_id])
        self._tell_prefill(ReleaseSlabs(slab.request_id, sum(len(each.extents) for each in leading)))

    def _start(self, request_id: str) -> None:
        """Start decode once all slabs have arrived or are lost; lost blocks are computed, token one maybe too."""
        self._tell_prefill(ReleaseHeld(request_id))
        token_ids = self._first_tokens.pop(request_id)
        if request_id in self._lost:
            self.decode.journal.counters["slabs_lost"] += 1
            self.decode.core.handle(Recompute(request_id))
            if self._rng.random() < 0.5:
                return
        self.decode.core.handle(StartDecode(request_id, token_ids))

    def _forget(self, request_id: str) -> None:
        """Drop a request whose first token was its last."""
        self._slabs_in_flight = [slab for slab in self._slabs_in_flight if slab.request_id != request_id]
        self._tell_prefill(ReleaseHeld(request_id))
        self.decode.core.handle(AbortRequest(request_id))

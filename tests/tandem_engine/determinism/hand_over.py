"""Runs a pair of engines: one computes the prompt, the other the rest."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_engine.messages import (
    AbortRequest,
    ExtentRef,
    ImportSlab,
    Recompute,
    ReleaseHeld,
    SealedBlocks,
    SlabImported,
    StartDecode,
)
from tests.tandem_engine.determinism.request_specs import RequestSpec
from tests.tandem_engine.determinism.stage import Engine, Stage


class Pair:
    """A prefill engine and a decode engine that reads its pool. Slabs arrive late, in any order; some are lost."""

    def __init__(self, stage: Stage, prefill: Engine, decode: Engine, loss: float = 0.0) -> None:
        self.prefill = prefill
        self.decode = decode
        self._rng = stage.rng
        self._loss = loss
        self._block_bytes = stage.model.geometry.bytes_per_block
        self._slabs_in_flight: list[ImportSlab] = []
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
            if all(slab.request_id != request_id for slab in self._slabs_in_flight):
                self._start(request_id)
        if self.decode.has_work:
            self.decode.step()

    def _step_prefill(self) -> None:
        done, sealed = self.prefill.step()
        for event in sealed:
            self._slabs_in_flight += self._slabs(event)
        for output in done.outputs:
            if output.finish_reason is None:
                self._first_tokens[output.request_id] = output.token_ids
            else:
                self._forget(output.request_id)

    def _slabs(self, sealed: SealedBlocks) -> list[ImportSlab]:
        """Cut sealed blocks into slabs of random sizes."""
        size = self._block_bytes
        extents = [
            ExtentRef(sealed.region_id, slot * size, size, slot, generation)
            for slot, generation in zip(sealed.slots, sealed.generations, strict=True)
        ]
        slabs: list[ImportSlab] = []
        start = 0
        while start < len(extents):
            end = start + self._rng.randint(1, len(extents) - start)
            first = sealed.first_block + start
            slabs.append(ImportSlab(sealed.request_id, len(slabs), first, extents[start:end], sealed.group))
            start = end
        return slabs

    def _import(self, slab: ImportSlab) -> None:
        if self._rng.random() < self._loss:
            self._lost.add(slab.request_id)
            return
        (imported,) = self.decode.core.handle(slab)
        assert isinstance(imported, SlabImported) and not imported.error, imported

    def _start(self, request_id: str) -> None:
        """Start decode once all slabs have arrived or are lost; lost blocks are computed, token one maybe too."""
        self.prefill.core.handle(ReleaseHeld(request_id))
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
        self.prefill.core.handle(ReleaseHeld(request_id))
        self.decode.core.handle(AbortRequest(request_id))

"""Reads a checkpoint's tensors, each with one copy in memory."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import torch

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.checkpoint import weight_files
from tandem_engine.models.lean.config import NotLean
from tandem_engine.models.lean.sources import LinearSource, Plan, Source
from tandem_engine.models.lean.tensor_file import BadTensorFile, TensorFile, TensorPlace
from tandem_engine.models.vision import text_name

_NEVER_READ = ("rotary_emb.inv_freq", "lm_head.weight")
"""Suffixes of tensors that a plan may leave out: recomputed, or tied to the embeddings."""


class CheckpointReader:
    """The text model's tensors of a folder's safetensors files; raises ModelUnusable with the remedy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored: dict[str, tuple[TensorFile, str]] = {}
        """By the name in the text model: file, and name in that file."""
        for path in weight_files(folder):
            file = self._open(path)
            names = {stored: text_name(stored) for stored in file.places}
            self._stored |= {name: (file, stored) for stored, name in names.items() if name is not None}

    @property
    def names(self) -> Set[str]:
        """The stored tensors, by their names in the text model."""
        return self._stored.keys()

    def check(self, plan: Plan) -> None:
        """Raise ModelUnusable if a tensor of the plan is missing; NotLean for unknown tensors or mixed dtypes."""
        needed = self.check_present(plan)
        unknown = [name for name in sorted(self._stored.keys() - needed) if not name.endswith(_NEVER_READ)]
        if unknown:
            raise NotLean(f"{self._folder} has {len(unknown)} weights that the decoder lacks, {unknown[0]} first")

    def check_present(self, plan: Plan) -> set[str]:
        """Return the names of the plan's tensors; raises ModelUnusable if one is missing, NotLean for mixed dtypes."""
        needed = {name for source in plan.values() for name in _tensors(source)}
        if missing := sorted(needed - self._stored.keys()):
            raise ModelUnusable(
                f"{self._folder} lacks {len(missing)} weights, {missing[0]} first; download the checkpoint anew, or "
                "save it again with `model.save_pretrained(folder)`"
            )
        for source in plan.values():
            if isinstance(source, LinearSource):
                self._check_dtypes(source.weights)
                self._check_dtypes(source.biases)
        return needed

    def linear(self, source: LinearSource, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the fused matrix (see `stack`) and the fused bias, float32."""
        matrix = self.stack(source.weights, dtype)
        bias = self.stack(source.biases, torch.float32) if source.biases else None
        if bias is not None and bias.shape != matrix.shape[:1]:
            raise ModelUnusable(
                f"{self._folder}: {', '.join(source.biases)} have {len(bias)} numbers for {len(matrix)} outputs; "
                "download the checkpoint anew"
            )
        return matrix, bias

    def stack(self, names: Sequence[str], dtype: torch.dtype | None) -> torch.Tensor:
        """Return the stacked tensors in fresh memory; `dtype` None: as stored, but float16 as float32."""
        places = [self._place(name) for name in names]
        if len({place.shape[1:] for place in places}) > 1:
            raise ModelUnusable(
                f"{self._folder} stores {', '.join(names)} in different widths ({places}); download the checkpoint anew"
            )
        try:
            stacked = self._read(names, places)
        except BadTensorFile as error:
            raise _unusable(self._folder, error) from error
        if dtype is None:
            dtype = torch.float32 if stacked.dtype == torch.float16 else stacked.dtype
        return stacked.to(dtype)

    def _check_dtypes(self, names: Sequence[str]) -> None:
        dtypes = {self._place(name).dtype_name for name in names}
        if len(dtypes) > 1:
            raise NotLean(
                f"{self._folder} stores {', '.join(names)}, which the decoder fuses, in different dtypes "
                f"({', '.join(sorted(dtypes))})"
            )

    def _read(self, names: Sequence[str], places: Sequence[TensorPlace]) -> torch.Tensor:
        counts = [place.shape[0] for place in places]
        stacked = torch.empty(sum(counts), *places[0].shape[1:], dtype=places[0].dtype)
        for name, part in zip(names, torch.split(stacked, counts), strict=True):
            file, stored = self._stored[name]
            file.read_into(stored, part)
        return stacked

    def _place(self, name: str) -> TensorPlace:
        file, stored = self._stored[name]
        return file.places[stored]

    def _open(self, path: Path) -> TensorFile:
        try:
            return TensorFile(path)
        except BadTensorFile as error:
            raise _unusable(self._folder, error) from error


def _tensors(source: Source) -> tuple[str, ...]:
    if isinstance(source, LinearSource):
        return (*source.weights, *source.biases)
    return (source.name,)


def _unusable(folder: Path, error: BadTensorFile) -> ModelUnusable:
    return ModelUnusable(f"{folder} cannot be read: {error}; download the checkpoint anew")

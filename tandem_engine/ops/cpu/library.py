"""Calls the C++ kernels through ctypes on plain pointers; the structures here mirror those in cpp/.

The structure of sampling rows is in sampling.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401  its OpenMP is mapped before anything of ours

from tandem_engine.ops.cpu.compile import NATIVE, SOURCES, KernelsUnavailable, compile_kernels
from tandem_engine.ops.cpu.prebuilt import PREBUILT, usable_libraries

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "tandem_set_num_threads": (ctypes.c_int, _POINTER, ctypes.c_int),
    "tandem_prefer_huge_pages": (_POINTER, _INT),
    "tandem_pack_f32": (_POINTER, _INT, _INT, _INT, _POINTER),
    "tandem_pack_bf16": (_POINTER, _INT, _INT, _INT, _POINTER),
    "tandem_unpack_f32": (_POINTER, _INT, _INT, _POINTER),
    "tandem_unpack_bf16": (_POINTER, _INT, _INT, _POINTER),
    "tandem_embed_f32": (_POINTER, _INT, _POINTER, _INT, _POINTER),
    "tandem_embed_bf16": (_POINTER, _INT, _POINTER, _INT, _POINTER),
    "tandem_linear": (_POINTER, _INT, _INT, _POINTER, _POINTER),
    "tandem_rms_norm": (_POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _FLOAT, _POINTER),
    "tandem_silu_gated": (_POINTER, _INT, _INT, _INT, _POINTER),
    "tandem_gelu_tanh_gated": (_POINTER, _INT, _INT, _INT, _POINTER),
    "tandem_rope_and_kv_write": (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "tandem_kv_write": (_POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER),
    "tandem_paged_attention": (_POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _FLOAT, _FLOAT),
    "tandem_layers": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "tandem_finish_layer": (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER),
    "tandem_layer_norm": (_POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _FLOAT, _POINTER),
    "tandem_gelu": (_POINTER, _INT, _INT, _INT, _POINTER),
    "tandem_gelu_tanh": (_POINTER, _INT, _INT, _INT, _POINTER),
    "tandem_self_attention": (_POINTER, _INT, _INT, _POINTER, _INT, _FLOAT, _POINTER),
    "tandem_encoder_layers": (_POINTER, _INT, _POINTER, _INT, _POINTER),
    "tandem_sample": (_POINTER, _INT, _INT, _POINTER, _INT),
    "tandem_begin_masks": (_POINTER, _POINTER, _INT),
    "tandem_finish_masks": (),
    "tandem_remembered_tokens": (_POINTER,),
}
_RESULTS: dict[str, type] = {"tandem_remembered_tokens": _POINTER}


class Weights(ctypes.Structure):
    """A linear layer's packed weights."""

    _fields_ = [("packed", _POINTER), ("bias", _POINTER), ("inputs", _INT), ("outputs", _INT), ("is_half", _INT)]


class StepTable(ctypes.Structure):
    """The data that all layers of a step share."""

    _fields_ = [
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("num_tokens", _INT),
        ("runs", _POINTER),
        ("num_runs", _INT),
        ("tables", _POINTER),
    ]


class Cache(ctypes.Structure):
    """The place of one layer's keys and values in the pool; strides in elements."""

    _fields_ = [
        ("pool", _POINTER),
        ("block_stride", _INT),
        ("layer_offset", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("block_size", _INT),
    ]


class QKTransform(ctypes.Structure):
    """The norms and the rotary embedding of queries and keys."""

    _fields_ = [
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("half", _INT),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("epsilon", _FLOAT),
    ]


class DenseLayer(ctypes.Structure):
    """The weights and parameters of a dense layer, and the place of its keys and values."""

    _fields_ = [
        *((name, _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")),
        *((name, _POINTER) for name in ("query_norm", "key_norm")),
        ("transform", _POINTER),
        ("cache", _POINTER),
        *((name, _INT) for name in ("group", "num_heads", "window", "is_gelu")),
        *((name, _FLOAT) for name in ("epsilon", "scale", "softcap")),
    ]


class EncoderLayer(ctypes.Structure):
    """The weights and parameters of an encoder layer."""

    _fields_ = [
        *((name, _POINTER) for name in ("qkv", "output", "up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "attention_bias", "mlp_norm", "mlp_bias")),
        *((name, _INT) for name in ("num_heads", "is_tanh")),
        *((name, _FLOAT) for name in ("epsilon", "scale")),
    ]


class GrammarCalls(ctypes.Structure):
    """The functions that make masks; mirrors cpp/masks.hpp, as `MaskRow` does."""

    _fields_ = [
        *((name, _POINTER) for name in ("consume_tokens", "validate_tokens", "compute_mask_into", "is_accepting")),
        ("rollback", _POINTER),
        ("ends", _POINTER),
        ("num_words", _INT),
    ]


class MaskRow(ctypes.Structure):
    """One answer whose masks are made."""

    _fields_ = [
        *((name, _POINTER) for name in ("matcher", "tokens", "masks")),
        *((name, _INT) for name in ("num_new", "num_drafts", "num_masks", "status")),
    ]


@dataclass(frozen=True)
class Kernels:
    """The loaded library, and where it comes from."""

    library: ctypes.CDLL
    origin: str
    """For the log: "prebuilt for x86-64-v4", or "compiled on this machine"."""


def arithmetic_name(library: ctypes.CDLL) -> str:
    """Return the name of a library's arithmetic: its bits depend on the sources and on FMA, on nothing else."""
    return f"cpu-{'fma' if library.tandem_has_fma() else 'no-fma'}-{SOURCES.digest()}"


def set_num_threads(library: ctypes.CDLL, num_threads: int, cores: Sequence[int] = ()) -> None:
    """Let a library compute with `num_threads` threads, the caller's included, from now on.

    With `cores`, one for each thread and the caller's first, the other threads are pinned to theirs.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, must be at least 1")
    if cores and len(cores) != num_threads:
        raise ValueError(f"{len(cores)} cores for {num_threads} threads; give one each, or none")
    library.tandem_set_num_threads(num_threads, (ctypes.c_int * len(cores))(*cores), len(cores))


def load_kernels(folder: Path | None = None, prebuilt: Path = PREBUILT) -> Kernels:
    """Load the wheel's kernels if it has some for this CPU; else compile them into `folder`, or the user's cache.

    Raises KernelsUnavailable, which names why neither is possible.
    """
    usable, reason = usable_libraries(prebuilt)
    failures = []
    for level, path in usable:
        try:
            return Kernels(load_file(path), f"prebuilt for {level.name}")
        except (OSError, AttributeError) as error:
            failures.append(f"cannot load {path}: {error}")
    why = "; ".join(failures) or reason
    try:
        return Kernels(load_library(folder), f"compiled on this machine; {why}")
    except KernelsUnavailable as error:
        raise KernelsUnavailable(f"{error}; {why}") from error


def load_library(folder: Path | None = None, machine_flags: Sequence[str] = NATIVE) -> ctypes.CDLL:
    """Compile the kernels if they are missing, and load them. Raises KernelsUnavailable."""
    path = compile_kernels(folder, machine_flags)
    try:
        return load_file(path)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(
            f"cannot load {path}: {error}; delete the file to compile it again, or set XDG_CACHE_HOME to a folder that "
            "is not mounted with noexec"
        ) from error


def load_file(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions. Raises OSError, or AttributeError if a function is missing."""
    library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    return library

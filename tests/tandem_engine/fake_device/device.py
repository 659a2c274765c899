"""A fake device: shapes, dtypes and devices of every op are checked, and nothing is computed.

Torch's fake tensors know their device, and an op on tensors of two devices fails as it would on a card. Tensors of the
CPU stay real, so numpy and C++ code runs on them. What crosses from the fake device to the CPU arrives as zeros.
Every crossing for which a program would wait for a card is recorded as a synchronisation.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

NAME = "gpu"
_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


def why_not() -> str | None:
    """Return why this torch has no fake device; None: it has one."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} cannot register a backend in Python"
    return None


def register() -> torch.device:
    """Register the device with torch, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME)


@contextmanager
def use() -> Iterator[FakeDevice]:
    """Make the device usable inside the block."""
    with _OnDevice(), FakeDevice() as mode:
        yield mode


class _OnDevice(TorchFunctionMode):
    """Makes `torch.tensor(values, device=...)` two steps: torch makes it one that no mode can see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and _is_fake(device := kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        return func(*args, **kwargs)


class FakeDevice(TorchDispatchMode):
    """While active, ops on the fake device run on fake tensors, and all others as always."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()
        self._synchronisations: list[str] = []

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Yield a list that gets the place of each synchronisation inside the block."""
        self._synchronisations = []
        yield self._synchronisations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not tree_any(_is_fake, (args, kwargs)):
            return func(*args, **kwargs)
        if func.namespace == "aten":
            with self:  # in inference mode, ops that are made of others arrive whole
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        if func is _aten._local_scalar_dense.default:
            self._synchronise(func)
            return _python_zero(args[0])
        if func in _COPIES and (crossed := self._crossed(func, args, kwargs)) is not None:
            return crossed
        with self._fake:
            return func(*tree_map(self._faked, args), **tree_map(self._faked, kwargs))

    def _crossed(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Record a copy between CPU and device, and return the tensor on the CPU; None: there is none."""
        is_copy_to = func is _aten.copy_.default
        source = args[1] if is_copy_to else args[0]
        target = args[0].device if is_copy_to else torch.device(kwargs.get("device") or source.device)
        if source.device.type == target.type:
            return None
        if not (args[2] if is_copy_to and len(args) > 2 else kwargs.get("non_blocking", False)):
            self._synchronise(func)
        if target.type != "cpu":
            return None
        if is_copy_to:
            here: torch.Tensor = args[0]
            return here.zero_()
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _faked(self, value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._fake.from_tensor(value) if is_real else value

    def _synchronise(self, func: Any) -> None:
        frames = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
        places = [f"{each.filename[-40:]}:{each.lineno}" for each in frames if each.filename != __file__]
        self._synchronisations.append(f"{func} at {' < '.join(places[:-4:-1])}")


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == NAME)


def _python_zero(tensor: torch.Tensor) -> Any:
    zero: Callable[[], Any] = bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int
    return zero()

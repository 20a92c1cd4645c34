"""Functions sent to another process by name, and trees of tensors sent by value."""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
import types
from typing import Any

import torch
from torch import Tensor


def dumps(value: Any) -> bytes:
    """``value`` as bytes for :func:`loads` in another process of this machine.

    Functions and classes go by name, those of a module that is a loose file (a test, a script) by its path.

    Raises:
      ValueError: for a function that has no importable name (a lambda, one defined in another) or a tensor that means
        nothing to another process; says what to send instead.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Inverse of :func:`dumps`."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType | type) and value.__module__ != __name__:
            return _by_name(value)
        if isinstance(value, Tensor):
            return _by_value(value)
        return NotImplemented


def _by_name(value: Any) -> Any:
    name = f"{value.__module__}.{value.__qualname__}"
    module = sys.modules.get(value.__module__)
    path = getattr(module, "__file__", None)
    if isinstance(value, type) and "<locals>" not in value.__qualname__ and path is None:
        return NotImplemented
    if "<" in value.__qualname__:
        raise ValueError(
            f"{name} cannot be sent to another process, which finds functions by name: define it at the top level of a "
            "module, and pass what it needs as arguments or with functools.partial"
        )
    if path is None:
        raise ValueError(f"{name} cannot be sent to another process: its module {value.__module__!r} is no file")
    return _find, (value.__module__, path, value.__qualname__)


def _find(module_name: str, path: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module_name)
    if found is None:
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            # A module that is on nobody's path, such as pytest loads with --import-mode=importlib.
            spec = importlib.util.spec_from_file_location(module_name, path)
            if spec is None or spec.loader is None:
                raise
            found = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = found
            spec.loader.exec_module(found)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _by_value(value: Tensor) -> Any:
    if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        raise ValueError(
            f"a {type(value).__name__} on {value.device} cannot be sent to another process: send plain CPU tensors (of "
            "a DTensor, its to_local(), or unshard(tree))"
        )
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _tensor, (raw, value.dtype, tuple(value.shape))


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(shape)

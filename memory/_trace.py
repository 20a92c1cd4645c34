"""Names in the traces of ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def trace_range(name: str | Callable[[], str]) -> AbstractContextManager[object]:
    """A range of this name in the trace of ``torch.profiler`` that is being made; nothing at all where none is.

    Args:
      name: or what makes it, which is called for a trace alone.
    """
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(name if isinstance(name, str) else name())

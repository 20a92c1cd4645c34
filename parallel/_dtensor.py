"""Whether something is a DTensor or a placement, asked without importing them for whoever has none.

``torch.distributed.tensor`` takes half a second to import, and a program on one process never needs it. Functions that
make such values import it; those that may meet them ask here, where nothing is imported: before somebody has imported
the classes there are no instances.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def is_dtensor(leaf: Any) -> TypeGuard[DTensor]:
    """Whether ``leaf`` is a DTensor."""
    return _is(leaf, "DTensor")


def is_placement(value: Any) -> TypeGuard[Placement]:
    """Whether ``value`` is a placement of any kind."""
    return _is(value, "Placement")


def is_shard(value: Any) -> TypeGuard[Shard]:
    """Whether ``value`` is a placement that splits a dimension."""
    return _is(value, "Shard")


def is_replicate(value: Any) -> TypeGuard[Replicate]:
    """Whether ``value`` is the placement of whole copies."""
    return _is(value, "Replicate")


def _is(value: Any, name: str) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, getattr(module, name))

"""The loss on held-out text, on one process or over ranks, whole layers gathered only while they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .chain import Microbatch, by_layer, make_chain
from .config import MoEConfig
from .data import rank_rows
from .memory import run_chain
from .model import Batch, Totals, count_totals
from .parallel import Layout, ShardedStore, all_reduce, axis_group, local_parts
from .sharding import make_sharding
from .train_step import TrainState


def make_evaluate(config: MoEConfig, layout: Layout | None = None) -> Callable[[TrainState, Iterable[Batch]], float]:
    """How to measure ``config`` on held-out batches.

    Args:
      config: the model.
      layout: where its parameters live; then every rank calls the function, with the same batches, of which it
        computes its own rows.

    Returns:
      ``evaluate(state, batches)``: nats per predicted token, the same on every rank. It changes nothing.
    """
    group = None if layout is None else axis_group(layout.mesh, *(layout.mesh.mesh_dim_names or ()))

    def mine(batch: Batch) -> Batch:
        if group is None:
            return batch
        rows = rank_rows(batch["tokens"].shape[0], dist.get_rank(group), dist.get_world_size(group))
        return {name: value[rows.start : rows.stop] for name, value in batch.items()}

    def evaluate(state: TrainState, batches: Iterable[Batch]) -> float:
        # Made here, so that its gather buffers last no longer.
        sharding = None if layout is None else make_sharding(config, layout, None, torch.float32)
        chain = make_chain(config, "fused", None if sharding is None else sharding.expert_parallel)
        layers: Mapping[str, Any] = by_layer(local_parts(state.params))
        if sharding is not None:
            layers = GatheredLayers(sharding.layers.store(layers))
        device = state.balance.device
        one = torch.ones((), dtype=torch.int64, device=device)
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for batch in map(mine, batches):
                here = {name: value.to(device) for name, value in batch.items()}
                # Divided by one, the head's cross-entropy is a sum.
                outcome = run_chain(chain, layers, Microbatch(here, state.balance, Totals(one, one)))
                total += torch.stack([outcome.metrics[-1].double(), count_totals(here).targets.double()])
            if group is not None:
                total = all_reduce(total, group)
        loss, tokens = total.tolist()
        return float(loss / max(1.0, tokens))

    return evaluate


class GatheredLayers(Mapping[str, Any]):
    """Sharded layers as whole ones: gathered when asked for; the two that were asked for last are held."""

    def __init__(self, store: ShardedStore) -> None:
        self._store = store
        self._held: list[tuple[str, int]] = []  # layers and their buffers, the oldest first

    def __getitem__(self, layer: str) -> Tensor:
        if layer not in [name for name, _ in self._held]:
            buffer = len(self._held)
            if buffer == 2:
                oldest, buffer = self._held.pop(0)
                self._store.release(oldest)
            self._store.gather(layer, buffer)
            self._held.append((layer, buffer))
        return self._store.parameters(layer)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._held])

    def __len__(self) -> int:
        return len(self._held)

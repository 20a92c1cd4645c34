"""The optimizer that a run's settings describe: Muon for the matrices, AdamW for the rest, or AdamW for all."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from torch.utils import _pytree as pytree

from . import optim
from .config import MoEConfig
from .optim import GradientTransformation
from .parameters import labels, matrix_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What to minimise with.

    Raises:
      ValueError: at construction, for a value out of its range; names the field and the value.
    """

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for weight matrices, AdamW for embeddings, routers, norms and biases. adamw: AdamW for all."""
    learning_rate: float = 0.02
    """Peak rate of Muon's matrices; unused by adamw."""
    adamw_learning_rate: float = 3e-3
    """Peak rate of what AdamW trains."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices (times the rate); embeddings, norms and biases are not decayed."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """After the warm-up: constant, then linear to zero (wsd); or half a cosine to zero."""
    warmup_fraction: float = 0.05
    """Share of the steps over which the rates rise from zero."""
    decay_fraction: float = 0.4
    """Share of the steps over which wsd falls to zero."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        for field in ("learning_rate", "adamw_learning_rate", "clip_norm"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"optimizer.{field} = {getattr(self, field)}: must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay = {self.weight_decay}: must be a finite number of at least 0")
        for field in ("warmup_fraction", "decay_fraction"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"optimizer.{field} = {getattr(self, field)}: must lie in 0..1")
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"optimizer.decay_fraction = {self.decay_fraction}: with warmup_fraction {self.warmup_fraction} it "
                "exceeds the whole run"
            )
        if self.name not in ("muon", "adamw"):
            raise ValueError(f"optimizer.name = {self.name!r}: must be 'muon' or 'adamw'")
        if self.schedule not in ("wsd", "cosine"):
            raise ValueError(f"optimizer.schedule = {self.schedule!r}: must be 'wsd' or 'cosine'")


def make_schedule(settings: OptimizerSettings, peak: float, steps: int) -> optim.Schedule:
    """The rate at each of ``steps`` steps, rising to ``peak`` and falling to zero."""
    warmup = max(1, round(settings.warmup_fraction * steps))
    if settings.schedule == "cosine":
        return optim.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))
    decay = max(1, round(settings.decay_fraction * steps))
    return optim.warmup_stable_decay_schedule(peak, warmup, max(0, steps - warmup - decay), decay)


def make_optimizer(
    config: MoEConfig, settings: OptimizerSettings, steps: int, *, foreach: bool = True
) -> GradientTransformation:
    """Clipping by the global norm, then each leaf's optimizer by its declared label.

    Args:
      config: the model, whose declaration gives each leaf's label.
      settings: what to minimise with.
      steps: length of the run, which the schedules span.
      foreach: see ``optim``; ``False`` inside a ``torch.func`` transform.
    """
    rest = make_schedule(settings, settings.adamw_learning_rate, steps)
    decay = settings.weight_decay
    adamw = optim.adamw(rest, b2=0.95, weight_decay=0.0, foreach=foreach)
    matrices = (
        optim.muon(
            make_schedule(settings, settings.learning_rate, steps),
            matrix_axes(config),
            weight_decay=decay,
            foreach=foreach,
        )
        if settings.name == "muon"
        else optim.adamw(rest, b2=0.95, weight_decay=decay, foreach=foreach)
    )
    tree = labels(config)
    # A model without routed layers has no router: partition refuses labels that name nothing.
    by_label = {label: matrices if label == "matrix" else adamw for label in sorted(set(pytree.tree_leaves(tree)))}
    return optim.chain(optim.clip_by_global_norm(settings.clip_norm, foreach=foreach), optim.partition(by_label, tree))

"""The optimizer that a run's settings describe: Muon for the matrices, AdamW for the rest, or AdamW for all."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from torch.utils import _pytree as pytree

from . import optim
from .config import MoEConfig
from .optim import GradientTransformation
from .parallel import Layout, global_norm, owner_orthogonalize
from .parameters import labels, matrix_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What to minimise with.

    Raises:
      ValueError: at construction, for a value out of its range; names the field and the value.
    """

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for weight matrices, AdamW for embeddings, routers, norms and biases. adamw: AdamW for all."""
    muon_learning_rate: float | None = None
    """Peak rate of Muon's matrices; 0.01 when not given. Not for adamw."""
    adamw_learning_rate: float = 3e-3
    """Peak rate of what AdamW trains."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices (times the rate); embeddings, norms and biases are not decayed."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    """After the warm-up: constant, then linear to zero (wsd); or half a cosine to zero."""
    warmup_fraction: float = 0.05
    """Share of the steps over which the rates rise from zero."""
    decay_fraction: float | None = None
    """Share of the steps over which wsd falls to zero; 0.4 when not given. Not for cosine."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        if self.name not in ("muon", "adamw"):
            raise self._error("name", "must be 'muon' or 'adamw'")
        if self.schedule not in ("wsd", "cosine"):
            raise self._error("schedule", "must be 'wsd' or 'cosine'")
        if self.name == "adamw" and self.muon_learning_rate is not None:
            raise self._error("muon_learning_rate", "name = 'adamw' uses no Muon")
        if self.schedule == "cosine" and self.decay_fraction is not None:
            raise self._error("decay_fraction", "schedule = 'cosine' falls all the time after its warm-up")
        for field, value in (
            ("muon_learning_rate", self.muon_peak),
            ("adamw_learning_rate", self.adamw_learning_rate),
            ("clip_norm", self.clip_norm),
        ):
            if not 0 < value < math.inf:
                raise self._error(field, "must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise self._error("weight_decay", "must be a finite number of at least 0")
        if not 0 <= self.warmup_fraction <= 1:
            raise self._error("warmup_fraction", "must lie in 0..1")
        if not 0 <= self.wsd_decay <= 1:
            raise self._error("decay_fraction", "must lie in 0..1")
        if self.schedule == "wsd" and self.warmup_fraction + self.wsd_decay > 1:
            raise self._error("warmup_fraction", f"with a decay_fraction of {self.wsd_decay} it exceeds the whole run")

    def _error(self, field: str, why: str) -> ValueError:
        return ValueError(f"optimizer.{field} = {getattr(self, field)!r}: {why}")

    @property
    def muon_peak(self) -> float:
        """``muon_learning_rate``, or its default."""
        return 0.01 if self.muon_learning_rate is None else self.muon_learning_rate

    @property
    def wsd_decay(self) -> float:
        """``decay_fraction``, or its default."""
        return 0.4 if self.decay_fraction is None else self.decay_fraction


def make_schedule(settings: OptimizerSettings, peak: float, steps: int) -> optim.Schedule:
    """The rate at each of ``steps`` steps.

    It rises in equal parts, the first step being one of them, to ``peak``, and falls to zero behind the last step.
    """
    rise = round(settings.warmup_fraction * steps)
    first = peak / (rise + 1)
    warmup = max(1, rise)
    if rise == 0:
        first = peak
    if settings.schedule == "cosine":
        return optim.warmup_cosine_decay_schedule(first, peak, warmup, max(steps, warmup + 1))
    decay = max(1, round(settings.wsd_decay * steps))
    stable = max(0, steps - warmup - decay)
    return optim.warmup_stable_decay_schedule(peak, warmup, stable, decay, init_value=first)


# Operations that a CPU process computes while it sends a byte to another on its machine, for `owner_orthogonalize`.
_CPU_FLOPS_PER_BYTE = 50.0


def make_optimizer(
    config: MoEConfig, settings: OptimizerSettings, steps: int, *, layout: Layout | None = None, foreach: bool = True
) -> GradientTransformation:
    """Clipping by the global norm, then each leaf's optimizer by its declared label.

    Args:
      config: the model, whose declaration gives each leaf's label.
      settings: what to minimise with.
      steps: length of the run, which the schedules span.
      layout: of the parameters over ranks (``model_layout``): every rank calls this, and each update, on local shards.
      foreach: see ``optim``; ``False`` inside a ``torch.func`` transform.
    """
    rest = make_schedule(settings, settings.adamw_learning_rate, steps)
    decay = settings.weight_decay
    adamw = optim.adamw(rest, b2=0.95, weight_decay=0.0, foreach=foreach)
    norm, orthogonalize = None, optim.orthogonalize_here
    if layout is not None:
        norm = functools.partial(global_norm, layout=layout)
        orthogonalize = (
            owner_orthogonalize(layout, flops_per_byte=_CPU_FLOPS_PER_BYTE)
            if layout.mesh.device_type == "cpu"
            else owner_orthogonalize(layout)
        )
    matrices = (
        optim.muon(
            make_schedule(settings, settings.muon_peak, steps),
            matrix_axes(config),
            weight_decay=decay,
            orthogonalize=orthogonalize,
            foreach=foreach,
        )
        if settings.name == "muon"
        else optim.adamw(rest, b2=0.95, weight_decay=decay, foreach=foreach)
    )
    tree = labels(config)
    # A model without routed layers has no router: partition refuses labels that name nothing.
    by_label = {label: matrices if label == "matrix" else adamw for label in sorted(set(pytree.tree_leaves(tree)))}
    clip = optim.clip_by_global_norm(settings.clip_norm, norm, foreach=foreach)
    return optim.chain(clip, optim.partition(by_label, tree))

"""Training of very large Mixture-of-Experts models as pure functions on ``torch.func``.

The model and its loss, the training step, and what they are made from. ``functional_moe.optim`` has the optimizers,
``functional_moe.parallel`` the collectives and placements, ``functional_moe.data`` the text.

Each name is imported when it is first asked for (PEP 562), so that whoever wants ``functional_moe.optim`` alone imports
that and torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import data as data
    from . import hf as hf
    from . import memory as memory
    from . import optim as optim
    from . import parallel as parallel
    from .budget import StepPlan as StepPlan
    from .budget import plan_step as plan_step
    from .chain import logits as logits
    from .chain import loss_fn as loss_fn
    from .config import PRESETS as PRESETS
    from .config import MoEConfig as MoEConfig
    from .config import preset as preset
    from .evaluate import make_evaluate as make_evaluate
    from .flops import train_flops_per_token as train_flops_per_token
    from .kernels import Kernels as Kernels
    from .model import Batch as Batch
    from .model import Metrics as Metrics
    from .model import Totals as Totals
    from .model import count_totals as count_totals
    from .model import init_balance as init_balance
    from .parameters import Params as Params
    from .parameters import abstract as abstract
    from .parameters import init as init
    from .sampling import generate as generate
    from .train_step import StepMetrics as StepMetrics
    from .train_step import TrainState as TrainState
    from .train_step import init_state as init_state
    from .train_step import make_train_step as make_train_step

_FOLDERS = ("data", "hf", "memory", "optim", "parallel")
_NAMES = {
    "budget": ("StepPlan", "plan_step"),
    "chain": ("logits", "loss_fn"),
    "config": ("PRESETS", "MoEConfig", "preset"),
    "evaluate": ("make_evaluate",),
    "flops": ("train_flops_per_token",),
    "kernels": ("Kernels",),
    "model": ("Batch", "Metrics", "Totals", "count_totals", "init_balance"),
    "parameters": ("Params", "abstract", "init"),
    "sampling": ("generate",),
    "train_step": ("StepMetrics", "TrainState", "init_state", "make_train_step"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_FOLDERS, *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

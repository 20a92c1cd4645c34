"""Training of very large Mixture-of-Experts models as pure functions on ``torch.func``.

The model and its loss, the training step, and what they are made from. ``functional_moe.optim`` has the optimizers,
``functional_moe.parallel`` the collectives and placements, ``functional_moe.data`` the text.
"""

from . import optim as optim
from .budget import StepPlan as StepPlan
from .budget import plan_step as plan_step
from .chain import logits as logits
from .chain import loss_fn as loss_fn
from .config import PRESETS as PRESETS
from .config import MoEConfig as MoEConfig
from .config import preset as preset
from .evaluate import make_evaluate as make_evaluate
from .flops import train_flops_per_token as train_flops_per_token
from .generate import generate as generate
from .kernels import Kernels as Kernels
from .model import Batch as Batch
from .model import Metrics as Metrics
from .model import Totals as Totals
from .model import count_totals as count_totals
from .model import init_balance as init_balance
from .parameters import Params as Params
from .parameters import abstract as abstract
from .parameters import init as init
from .train_step import StepMetrics as StepMetrics
from .train_step import TrainState as TrainState
from .train_step import init_state as init_state
from .train_step import make_train_step as make_train_step

"""Gradient transformations as pure functions over parameter trees.

The contract and its combinators, then optimizers, then what they are made of::

    tx = chain(clip_by_global_norm(1.0), partition({"muon": muon(0.02, axes), "adamw": adamw(3e-4)}, labels))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = apply_updates(params, updates)

Nothing changes its inputs. Moments are float32. List kernels (``foreach=True``) are the default; with
``foreach=False`` everything composes with ``torch.func``.
"""

from ._accumulate import AccumulateState as AccumulateState
from ._accumulate import accumulate as accumulate
from ._adam import ScaleByAdamState as ScaleByAdamState
from ._adam import adamw as adamw
from ._adam import scale_by_adam as scale_by_adam
from ._base import EmptyState as EmptyState
from ._base import GradientTransformation as GradientTransformation
from ._base import UpdateFn as UpdateFn
from ._base import apply_updates as apply_updates
from ._base import apply_updates_in_place as apply_updates_in_place
from ._base import chain as chain
from ._base import identity as identity
from ._base import stateless as stateless
from ._buckets import Buckets as Buckets
from ._buckets import BucketStates as BucketStates
from ._buckets import BucketUpdate as BucketUpdate
from ._clipping import clip_by_global_norm as clip_by_global_norm
from ._clipping import global_norm as global_norm
from ._decay import add_decayed_weights as add_decayed_weights
from ._learning_rate import LearningRateState as LearningRateState
from ._learning_rate import ScalarOrSchedule as ScalarOrSchedule
from ._learning_rate import Schedule as Schedule
from ._learning_rate import ScheduledLearningRateState as ScheduledLearningRateState
from ._learning_rate import learning_rates as learning_rates
from ._learning_rate import scale_by_learning_rate as scale_by_learning_rate
from ._learning_rate import set_learning_rates as set_learning_rates
from ._lion import ScaleByLionState as ScaleByLionState
from ._lion import lion as lion
from ._lion import scale_by_lion as scale_by_lion
from ._masking import MaskedState as MaskedState
from ._masking import PartitionState as PartitionState
from ._masking import masked as masked
from ._masking import partition as partition
from ._matrix_axes import MatrixAxes as MatrixAxes
from ._matrix_axes import join_matrices as join_matrices
from ._matrix_axes import matrix_scale as matrix_scale
from ._matrix_axes import split_matrices as split_matrices
from ._matrix_product import ROWS_PER_SHAPE as ROWS_PER_SHAPE
from ._matrix_product import matrix_product as matrix_product
from ._matrix_product import product_over_rows as product_over_rows
from ._matrix_product import uses_onednn as uses_onednn
from ._muon import Orthogonalize as Orthogonalize
from ._muon import ScaleByMuonState as ScaleByMuonState
from ._muon import muon as muon
from ._muon import orthogonalize_here as orthogonalize_here
from ._muon import orthogonalize_whole as orthogonalize_whole
from ._muon import scale_by_muon as scale_by_muon
from ._newton_schulz import KELLER_JORDAN as KELLER_JORDAN
from ._newton_schulz import POLAR_EXPRESS as POLAR_EXPRESS
from ._newton_schulz import newton_schulz as newton_schulz
from ._newton_schulz import singular_value_band as singular_value_band
from ._qk_clip import max_attention_logits as max_attention_logits
from ._qk_clip import qk_clip as qk_clip
from ._schedules import constant_schedule as constant_schedule
from ._schedules import cosine_decay_schedule as cosine_decay_schedule
from ._schedules import inverse_sqrt_schedule as inverse_sqrt_schedule
from ._schedules import join_schedules as join_schedules
from ._schedules import linear_schedule as linear_schedule
from ._schedules import warmup_constant_schedule as warmup_constant_schedule
from ._schedules import warmup_cosine_decay_schedule as warmup_cosine_decay_schedule
from ._schedules import warmup_stable_decay_schedule as warmup_stable_decay_schedule
from ._sgd import TraceState as TraceState
from ._sgd import sgd as sgd
from ._sgd import trace as trace
from ._tree import MaskedNode as MaskedNode
from ._tree import path_name as path_name

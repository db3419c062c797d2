# SPDX-License-Identifier: Apache-2.0
"""Train many models of one structure as one array on one device, with the results of separate runs.

`fuse` makes a `FusedArray`; the optimizers, schedules, gradient scaler and clipping of this package treat each model by
itself.
"""

from thinwire.arrays.fusion.array import FusedArray, fuse
from thinwire.arrays.fusion.autotune import autotune_choices, clear_autotune_cache, measuring
from thinwire.arrays.fusion.batch import Each
from thinwire.arrays.fusion.data import MemberBatches
from thinwire.arrays.fusion.memory import keep_memory
from thinwire.arrays.fusion.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, FusedOptimizer, RMSprop
from thinwire.arrays.fusion.scaling import GradScaler, clip_grad_norm_, clip_grad_value_, gradient_norms
from thinwire.arrays.fusion.schedules import Schedules
from thinwire.arrays.fusion.store import Selection

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Each",
    "FusedArray",
    "FusedOptimizer",
    "GradScaler",
    "MemberBatches",
    "RMSprop",
    "Schedules",
    "Selection",
    "autotune_choices",
    "clear_autotune_cache",
    "clip_grad_norm_",
    "clip_grad_value_",
    "fuse",
    "gradient_norms",
    "keep_memory",
    "measuring",
]

"""Many models of one structure, trained as one: each keeps its own mathematics.

`fuse` makes a `FusedArray`; optimizers, schedules, scaler and clipping have one of everything per model.
"""

from thinwire.fusion.array import FusedArray, fuse
from thinwire.fusion.autotune import choices, forget_choices, measuring, remember_choices
from thinwire.fusion.batch import Each
from thinwire.fusion.laboratory import Laboratory
from thinwire.fusion.memory import keep_memory
from thinwire.fusion.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, FusedOptimizer, RMSprop
from thinwire.fusion.scaling import GradScaler, clip_grad_norm_, clip_grad_value_, gradient_norms
from thinwire.fusion.schedules import Schedules
from thinwire.fusion.store import Selection

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
    "Laboratory",
    "RMSprop",
    "Schedules",
    "Selection",
    "choices",
    "clip_grad_norm_",
    "clip_grad_value_",
    "forget_choices",
    "fuse",
    "gradient_norms",
    "keep_memory",
    "measuring",
    "remember_choices",
]

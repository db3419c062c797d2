"""Many models of one structure, trained as one: each keeps its own mathematics.

`fuse` makes a `FusedArray`; optimizers, schedules, scaler and clipping have one of everything per model.
"""

from laconic.fusion.array import FusedArray, fuse
from laconic.fusion.batch import Each
from laconic.fusion.choice import choices, forget_choices, measuring, remember_choices
from laconic.fusion.laboratory import Laboratory
from laconic.fusion.memory import keep_memory
from laconic.fusion.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, FusedOptimizer, RMSprop
from laconic.fusion.scaling import GradScaler, clip_grad_norm_, clip_grad_value_, gradient_norms
from laconic.fusion.schedules import Schedules
from laconic.fusion.store import Selection

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

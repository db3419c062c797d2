# SPDX-License-Identifier: Apache-2.0
"""Optimizers of an array: those of `torch.optim` and LAMB, with each hyperparameter per model."""

from thinwire.arrays.fusion.optimizers.adam import Adam, AdamW
from thinwire.arrays.fusion.optimizers.adaptive import Adadelta, Adagrad, RMSprop
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.optimizers.lamb import LAMB
from thinwire.arrays.fusion.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "FusedOptimizer", "RMSprop"]

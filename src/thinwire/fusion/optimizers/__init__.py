# SPDX-License-Identifier: Apache-2.0
"""Optimizers of an array: those of `torch.optim` and LAMB, with each hyperparameter per model."""

from thinwire.fusion.optimizers.adam import Adam, AdamW
from thinwire.fusion.optimizers.adaptive import Adadelta, Adagrad, RMSprop
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.optimizers.lamb import LAMB
from thinwire.fusion.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "FusedOptimizer", "RMSprop"]

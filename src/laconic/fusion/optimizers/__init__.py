"""Optimizers of an array: torch's, with one of each hyperparameter per model."""

from laconic.fusion.optimizers.adam import Adam, AdamW
from laconic.fusion.optimizers.adaptive import Adadelta, Adagrad, RMSprop
from laconic.fusion.optimizers.base import FusedOptimizer
from laconic.fusion.optimizers.lamb import LAMB
from laconic.fusion.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "FusedOptimizer", "RMSprop"]

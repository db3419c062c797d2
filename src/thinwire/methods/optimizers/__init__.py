# SPDX-License-Identifier: Apache-2.0
"""Optimizers that torch does not have."""

from thinwire.methods.optimizers.acsa import AcSA
from thinwire.methods.optimizers.combined import CombinedOptimizer
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.optimizers.saga import Saga
from thinwire.methods.optimizers.svrg import Svrg
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam

__all__ = ["AcSA", "CombinedOptimizer", "Lamb", "OneBitAdam", "OneBitLamb", "Saga", "Svrg", "ZeroOneAdam"]

# SPDX-License-Identifier: Apache-2.0
"""Optimizers that torch does not have."""

from thinwire.optimizers.acsa import AcSA
from thinwire.optimizers.combined import CombinedOptimizer
from thinwire.optimizers.lamb import Lamb
from thinwire.optimizers.one_bit_adam import OneBitAdam
from thinwire.optimizers.one_bit_lamb import OneBitLamb
from thinwire.optimizers.saga import Saga
from thinwire.optimizers.svrg import Svrg
from thinwire.optimizers.zero_one_adam import ZeroOneAdam

__all__ = ["AcSA", "CombinedOptimizer", "Lamb", "OneBitAdam", "OneBitLamb", "Saga", "Svrg", "ZeroOneAdam"]

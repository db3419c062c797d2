"""What changes the update, given a gradient: optimizers that torch has not."""

from laconic.optimizers.acsa import AcSA
from laconic.optimizers.lamb import Lamb
from laconic.optimizers.one_bit_adam import OneBitAdam
from laconic.optimizers.one_bit_lamb import OneBitLamb
from laconic.optimizers.saga import Saga
from laconic.optimizers.svrg import Svrg
from laconic.optimizers.zero_one_adam import ZeroOneAdam

__all__ = ["AcSA", "Lamb", "OneBitAdam", "OneBitLamb", "Saga", "Svrg", "ZeroOneAdam"]

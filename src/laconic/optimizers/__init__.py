"""What changes the update, given a gradient: optimizers that torch has not."""

from laconic.optimizers.acsa import AcSA
from laconic.optimizers.saga import Saga
from laconic.optimizers.svrg import Svrg

__all__ = ["AcSA", "Saga", "Svrg"]

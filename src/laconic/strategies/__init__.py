"""When is what said: one file per method."""

from laconic.strategies.all_reduce import AllReduce
from laconic.strategies.base import Strategy
from laconic.strategies.gossip import Gossip
from laconic.strategies.local_sgd import Local, LocalSGD
from laconic.strategies.push_sum import PushSum
from laconic.strategies.slow_momentum import SlowMo

__all__ = ["AllReduce", "Gossip", "Local", "LocalSGD", "PushSum", "SlowMo", "Strategy"]

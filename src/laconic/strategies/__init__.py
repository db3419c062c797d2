"""When is what said: one file per method."""

from laconic.strategies.ad_psgd import ADPSGD
from laconic.strategies.all_reduce import AllReduce
from laconic.strategies.base import Strategy
from laconic.strategies.cocod import CoCoD
from laconic.strategies.decentlam import DecentLaM
from laconic.strategies.double_averaging import DoubleAveraging
from laconic.strategies.eager_push_sum import EagerPushSum
from laconic.strategies.exact_diffusion import ExactDiffusion
from laconic.strategies.gossip import Gossip
from laconic.strategies.inner_outer import InnerOuter
from laconic.strategies.local_sgd import Local, LocalSGD
from laconic.strategies.overlap_local_sgd import OverlapLocalSGD
from laconic.strategies.probe import Probe
from laconic.strategies.push_sum import PushSum
from laconic.strategies.quasi_global import QuasiGlobal
from laconic.strategies.slow_momentum import SlowMo
from laconic.strategies.streaming import Streaming

__all__ = [
    "ADPSGD",
    "AllReduce",
    "CoCoD",
    "DecentLaM",
    "DoubleAveraging",
    "EagerPushSum",
    "ExactDiffusion",
    "Gossip",
    "InnerOuter",
    "Local",
    "LocalSGD",
    "OverlapLocalSGD",
    "Probe",
    "PushSum",
    "QuasiGlobal",
    "SlowMo",
    "Strategy",
    "Streaming",
]

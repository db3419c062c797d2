"""When is what said: one file per method."""

from laconic.strategies.ad_psgd import ADPSGD
from laconic.strategies.all_reduce import AllReduce
from laconic.strategies.async_leader import AsyncLSGD
from laconic.strategies.backup_workers import BackupWorkers
from laconic.strategies.base import Strategy
from laconic.strategies.choco import Choco
from laconic.strategies.cocod import CoCoD
from laconic.strategies.decentlam import DecentLaM
from laconic.strategies.double_averaging import DoubleAveraging
from laconic.strategies.dynamic_quantization import DQSGD
from laconic.strategies.eager_push_sum import EagerPushSum
from laconic.strategies.elastic_averaging import EASGD
from laconic.strategies.exact_diffusion import ExactDiffusion
from laconic.strategies.fetch import FetchSGD
from laconic.strategies.gossip import Gossip
from laconic.strategies.inner_outer import InnerOuter
from laconic.strategies.leader import LSGD
from laconic.strategies.leader_gradient import LGD
from laconic.strategies.local_sgd import Local, LocalSGD
from laconic.strategies.one_bit import CompressedMomentum
from laconic.strategies.overlap_local_sgd import OverlapLocalSGD
from laconic.strategies.parameter_server import ParameterServer
from laconic.strategies.probe import Probe
from laconic.strategies.push_sum import PushSum
from laconic.strategies.quasi_global import QuasiGlobal
from laconic.strategies.sketched import SketchedSGD
from laconic.strategies.slow_momentum import SlowMo
from laconic.strategies.streaming import Streaming
from laconic.strategies.zero_one import ZeroOne

__all__ = [
    "ADPSGD",
    "DQSGD",
    "EASGD",
    "LGD",
    "LSGD",
    "AllReduce",
    "AsyncLSGD",
    "BackupWorkers",
    "Choco",
    "CoCoD",
    "CompressedMomentum",
    "DecentLaM",
    "DoubleAveraging",
    "EagerPushSum",
    "ExactDiffusion",
    "FetchSGD",
    "Gossip",
    "InnerOuter",
    "Local",
    "LocalSGD",
    "OverlapLocalSGD",
    "ParameterServer",
    "Probe",
    "PushSum",
    "QuasiGlobal",
    "SketchedSGD",
    "SlowMo",
    "Strategy",
    "Streaming",
    "ZeroOne",
]

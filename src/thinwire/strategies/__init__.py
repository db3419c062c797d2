"""Strategies: when workers send what to each other. One file per method."""

from thinwire.strategies.base import Strategy
from thinwire.strategies.gossip.ad_psgd import ADPSGD
from thinwire.strategies.gossip.choco import Choco
from thinwire.strategies.gossip.decentlam import DecentLaM
from thinwire.strategies.gossip.double_averaging import DoubleAveraging
from thinwire.strategies.gossip.exact_diffusion import ExactDiffusion
from thinwire.strategies.gossip.gossip import Gossip
from thinwire.strategies.gossip.quasi_global import QuasiGlobal
from thinwire.strategies.gradients.all_reduce import AllReduce
from thinwire.strategies.gradients.dynamic_quantization import DQSGD
from thinwire.strategies.gradients.fetch import FetchSGD
from thinwire.strategies.gradients.one_bit import CompressedMomentum
from thinwire.strategies.gradients.sketched import SketchedSGD
from thinwire.strategies.gradients.zero_one import ZeroOne
from thinwire.strategies.leader.async_leader import AsyncLeaderSGD
from thinwire.strategies.leader.leader import LeaderSGD
from thinwire.strategies.leader.leader_gradient import LeaderGradientDescent
from thinwire.strategies.local.cocod import CoCoD
from thinwire.strategies.local.elastic_averaging import EASGD
from thinwire.strategies.local.local_sgd import Local, LocalSGD
from thinwire.strategies.local.minibatch_local_sgd import MinibatchLocalSGD
from thinwire.strategies.local.overlap_local_sgd import OverlapLocalSGD
from thinwire.strategies.local.slow_momentum import SlowMo
from thinwire.strategies.local.streaming import Streaming
from thinwire.strategies.push_sum.eager_push_sum import EagerPushSum
from thinwire.strategies.push_sum.push_sum import PushSum
from thinwire.strategies.stragglers.backup_workers import BackupWorkers
from thinwire.strategies.stragglers.parameter_server import ParameterServer
from thinwire.strategies.wrappers.probe import Probe

__all__ = [
    "ADPSGD",
    "DQSGD",
    "EASGD",
    "AllReduce",
    "AsyncLeaderSGD",
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
    "LeaderGradientDescent",
    "LeaderSGD",
    "Local",
    "LocalSGD",
    "MinibatchLocalSGD",
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

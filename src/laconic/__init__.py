"""laconic: train PyTorch models over slow networks, the same model said in fewer words.

    replica = laconic.attach(model, optimizer, laconic.SlowMo(period=12))

and the training loop stays as it was. See `attach`.
"""

from laconic._version import __version__
from laconic.attach import Attached, attach
from laconic.codecs.base import Codec
from laconic.codecs.cast import Bf16, Fp16
from laconic.comm.base import Comm, Meter, Work
from laconic.comm.counting import CountingComm
from laconic.comm.group import GroupComm
from laconic.comm.threads import ThreadComm, run_threads
from laconic.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DeadlineError,
    LaconicError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
)
from laconic.recipe import parse
from laconic.replica import Replica
from laconic.strategies import AllReduce, Gossip, Local, LocalSGD, PushSum, SlowMo, Strategy
from laconic.topology import Complete, Hypercube, OnePeerExponential, Peers, Ring, Topology

__all__ = [
    "AllReduce",
    "Attached",
    "Bf16",
    "CheckpointError",
    "Codec",
    "Comm",
    "CommError",
    "Complete",
    "ConfigError",
    "CountingComm",
    "DeadlineError",
    "Fp16",
    "Gossip",
    "GroupComm",
    "Hypercube",
    "LaconicError",
    "Local",
    "LocalSGD",
    "Meter",
    "MismatchError",
    "NonFiniteError",
    "OnePeerExponential",
    "PeerLostError",
    "Peers",
    "PushSum",
    "Replica",
    "Ring",
    "SlowMo",
    "Strategy",
    "ThreadComm",
    "Topology",
    "Work",
    "__version__",
    "attach",
    "parse",
    "run_threads",
]

"""laconic: train PyTorch models over slow networks, the same model said in fewer words.

    replica = laconic.attach(model, optimizer, laconic.SlowMo(period=12))

and the training loop stays as it was. See `attach`. Names are imported when they are first used, so that the command
line need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from laconic._version import __version__

if TYPE_CHECKING:
    from laconic.attached import Attached, attach
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
    from laconic.optimizers import AcSA, Saga, Svrg
    from laconic.outer import Outer
    from laconic.recipe import brief, parse
    from laconic.replica import Replica
    from laconic.strategies import (
        ADPSGD,
        AllReduce,
        CoCoD,
        DecentLaM,
        DoubleAveraging,
        EagerPushSum,
        ExactDiffusion,
        Gossip,
        InnerOuter,
        Local,
        LocalSGD,
        OverlapLocalSGD,
        Probe,
        PushSum,
        QuasiGlobal,
        SlowMo,
        Strategy,
        Streaming,
    )
    from laconic.topology import (
        BaseGraph,
        BipartiteExponential,
        Complete,
        DirectedExponential,
        FromGraph,
        Hierarchical,
        Hypercube,
        OnePeerExponential,
        Peers,
        PPeerExponential,
        RandomMatching,
        Ring,
        Star,
        SymmetricExponential,
        Topology,
        Torus,
    )

_PLACES = {
    "attached": "Attached attach",
    "codecs.base": "Codec",
    "codecs.cast": "Bf16 Fp16",
    "comm.base": "Comm Meter Work",
    "comm.counting": "CountingComm",
    "comm.group": "GroupComm",
    "comm.threads": "ThreadComm run_threads",
    "errors": (
        "CheckpointError CommError ConfigError DeadlineError LaconicError MismatchError NonFiniteError PeerLostError"
    ),
    "recipe": "brief parse",
    "replica": "Replica",
    "strategies": (
        "ADPSGD AllReduce CoCoD DecentLaM DoubleAveraging EagerPushSum ExactDiffusion Gossip InnerOuter "
        "Local LocalSGD OverlapLocalSGD Probe PushSum QuasiGlobal SlowMo Strategy Streaming"
    ),
    "topology": (
        "BaseGraph BipartiteExponential Complete DirectedExponential FromGraph Hierarchical Hypercube "
        "OnePeerExponential PPeerExponential Peers RandomMatching Ring Star SymmetricExponential "
        "Topology Torus"
    ),
    "optimizers": "AcSA Saga Svrg",
    "outer": "Outer",
}

__all__ = [
    "ADPSGD",
    "AcSA",
    "AllReduce",
    "Attached",
    "BaseGraph",
    "Bf16",
    "BipartiteExponential",
    "CheckpointError",
    "CoCoD",
    "Codec",
    "Comm",
    "CommError",
    "Complete",
    "ConfigError",
    "CountingComm",
    "DeadlineError",
    "DecentLaM",
    "DirectedExponential",
    "DoubleAveraging",
    "EagerPushSum",
    "ExactDiffusion",
    "Fp16",
    "FromGraph",
    "Gossip",
    "GroupComm",
    "Hierarchical",
    "Hypercube",
    "InnerOuter",
    "LaconicError",
    "Local",
    "LocalSGD",
    "Meter",
    "MismatchError",
    "NonFiniteError",
    "OnePeerExponential",
    "Outer",
    "OverlapLocalSGD",
    "PPeerExponential",
    "PeerLostError",
    "Peers",
    "Probe",
    "PushSum",
    "QuasiGlobal",
    "RandomMatching",
    "Replica",
    "Ring",
    "Saga",
    "SlowMo",
    "Star",
    "Strategy",
    "Streaming",
    "Svrg",
    "SymmetricExponential",
    "ThreadComm",
    "Topology",
    "Torus",
    "Work",
    "__version__",
    "attach",
    "brief",
    "parse",
    "run_threads",
]


def __getattr__(name: str) -> object:
    """Import a public name from where it is defined, once."""
    for place, names in _PLACES.items():
        if name in names.split():
            value: object = getattr(import_module(f"laconic.{place}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'laconic' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return __all__

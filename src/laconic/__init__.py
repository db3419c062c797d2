"""laconic: train PyTorch models over slow networks, the same model said in fewer words.

    replica = laconic.attach(model, optimizer, laconic.SlowMo(period=12))

and the training loop stays as it was. See `attach`. Names are imported when they are first used, so that the command
line need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from laconic._version import __version__

if TYPE_CHECKING:
    from laconic.arrivals.dispenser import Dispenser
    from laconic.arrivals.log import memberships
    from laconic.attached import Attached, attach
    from laconic.bit_rules import BitBudget, ErrorBound, FixedBits
    from laconic.codecs.base import Codec
    from laconic.codecs.cast import Bf16, Fp8, Fp16, Fp32
    from laconic.codecs.feedback import ErrorFeedback, resize_errors
    from laconic.codecs.majority import MajorityVote
    from laconic.codecs.natural import Natural
    from laconic.codecs.one_bit import OneBit
    from laconic.codecs.qsgd import QSGD
    from laconic.codecs.quantize import Quantize
    from laconic.codecs.random_k import RandomK
    from laconic.codecs.sketch import Sketch
    from laconic.codecs.terngrad import TernGrad
    from laconic.codecs.top_k import TopK
    from laconic.comm.base import Comm
    from laconic.comm.counting import CountingComm
    from laconic.comm.group import GroupComm
    from laconic.comm.threads import ThreadComm, run_threads
    from laconic.comm.work import Meter, Work
    from laconic.election import Metric
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
    from laconic.fusion import Each, FusedArray, fuse
    from laconic.hooks import ddp_hook, fsdp_hook
    from laconic.optimizers import AcSA, Lamb, OneBitAdam, OneBitLamb, Saga, Svrg, ZeroOneAdam
    from laconic.outer import Outer
    from laconic.recipe import brief, parse
    from laconic.replica import Replica
    from laconic.strategies import (
        ADPSGD,
        DQSGD,
        EASGD,
        LGD,
        LSGD,
        AllReduce,
        AsyncLSGD,
        BackupWorkers,
        Choco,
        CoCoD,
        CompressedMomentum,
        DecentLaM,
        DoubleAveraging,
        EagerPushSum,
        ExactDiffusion,
        FetchSGD,
        Gossip,
        InnerOuter,
        Local,
        LocalSGD,
        OverlapLocalSGD,
        ParameterServer,
        Probe,
        PushSum,
        QuasiGlobal,
        SketchedSGD,
        SlowMo,
        Strategy,
        Streaming,
        ZeroOne,
    )
    from laconic.tensor2d.parallelize import parallelize_2d
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
    "codecs.cast": "Bf16 Fp16 Fp32 Fp8",
    "comm.base": "Comm",
    "comm.counting": "CountingComm",
    "comm.group": "GroupComm",
    "comm.threads": "ThreadComm run_threads",
    "comm.work": "Meter Work",
    "errors": (
        "CheckpointError CommError ConfigError DeadlineError LaconicError MismatchError NonFiniteError PeerLostError"
    ),
    "recipe": "brief parse",
    "replica": "Replica",
    "strategies": (
        "ADPSGD AllReduce AsyncLSGD BackupWorkers Choco CoCoD CompressedMomentum DQSGD DecentLaM "
        "DoubleAveraging EASGD EagerPushSum ExactDiffusion FetchSGD Gossip InnerOuter LGD LSGD Local "
        "LocalSGD OverlapLocalSGD ParameterServer Probe PushSum QuasiGlobal SketchedSGD SlowMo Strategy "
        "Streaming ZeroOne"
    ),
    "topology": (
        "BaseGraph BipartiteExponential Complete DirectedExponential FromGraph Hierarchical Hypercube "
        "OnePeerExponential PPeerExponential Peers RandomMatching Ring Star SymmetricExponential "
        "Topology Torus"
    ),
    "optimizers": "AcSA Lamb OneBitAdam OneBitLamb Saga Svrg ZeroOneAdam",
    "outer": "Outer",
    "election": "Metric",
    "arrivals.dispenser": "Dispenser",
    "arrivals.log": "memberships",
    "codecs.feedback": "ErrorFeedback resize_errors",
    "codecs.majority": "MajorityVote",
    "codecs.natural": "Natural",
    "codecs.one_bit": "OneBit",
    "codecs.qsgd": "QSGD",
    "codecs.quantize": "Quantize",
    "codecs.random_k": "RandomK",
    "codecs.sketch": "Sketch",
    "codecs.terngrad": "TernGrad",
    "codecs.top_k": "TopK",
    "hooks": "ddp_hook fsdp_hook",
    "fusion": "Each FusedArray fuse",
    "tensor2d.parallelize": "parallelize_2d",
    "bit_rules": "BitBudget ErrorBound FixedBits",
}

__all__ = [
    "ADPSGD",
    "DQSGD",
    "EASGD",
    "LGD",
    "LSGD",
    "QSGD",
    "AcSA",
    "AllReduce",
    "AsyncLSGD",
    "Attached",
    "BackupWorkers",
    "BaseGraph",
    "Bf16",
    "BipartiteExponential",
    "BitBudget",
    "CheckpointError",
    "Choco",
    "CoCoD",
    "Codec",
    "Comm",
    "CommError",
    "Complete",
    "CompressedMomentum",
    "ConfigError",
    "CountingComm",
    "DeadlineError",
    "DecentLaM",
    "DirectedExponential",
    "Dispenser",
    "DoubleAveraging",
    "Each",
    "EagerPushSum",
    "ErrorBound",
    "ErrorFeedback",
    "ExactDiffusion",
    "FetchSGD",
    "FixedBits",
    "Fp8",
    "Fp16",
    "Fp32",
    "FromGraph",
    "FusedArray",
    "Gossip",
    "GroupComm",
    "Hierarchical",
    "Hypercube",
    "InnerOuter",
    "LaconicError",
    "Lamb",
    "Local",
    "LocalSGD",
    "MajorityVote",
    "Meter",
    "Metric",
    "MismatchError",
    "Natural",
    "NonFiniteError",
    "OneBit",
    "OneBitAdam",
    "OneBitLamb",
    "OnePeerExponential",
    "Outer",
    "OverlapLocalSGD",
    "PPeerExponential",
    "ParameterServer",
    "PeerLostError",
    "Peers",
    "Probe",
    "PushSum",
    "Quantize",
    "QuasiGlobal",
    "RandomK",
    "RandomMatching",
    "Replica",
    "Ring",
    "Saga",
    "Sketch",
    "SketchedSGD",
    "SlowMo",
    "Star",
    "Strategy",
    "Streaming",
    "Svrg",
    "SymmetricExponential",
    "TernGrad",
    "ThreadComm",
    "TopK",
    "Topology",
    "Torus",
    "Work",
    "ZeroOne",
    "ZeroOneAdam",
    "__version__",
    "attach",
    "brief",
    "ddp_hook",
    "fsdp_hook",
    "fuse",
    "memberships",
    "parallelize_2d",
    "parse",
    "resize_errors",
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

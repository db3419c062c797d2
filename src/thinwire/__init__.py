"""thinwire: train PyTorch models over thin wires.

    worker = thinwire.attach(model, optimizer, thinwire.SlowMo(period=12))

and the training loop stays as it was. See `attach`.

Public names are listed here, once, and imported when they are first used, so that the command line need not wait for
torch. `__init__.pyi` says the same to type checkers; `python tools/write_stub.py` writes it from the list.
"""

from importlib import import_module
from types import MappingProxyType

from thinwire._version import __version__

# The module within thinwire, and the names that it gives to the public.
PUBLIC_NAMES = MappingProxyType(
    {
        "codecs.base": "Codec",
        "codecs.cast": "Bf16 Fp8 Fp16 Fp32",
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
        "comm.base": "Comm",
        "comm.work": "Meter",
        "comm.counting": "CountingComm",
        "comm.group": "GroupComm",
        "comm.threads": "ThreadComm run_threads",
        "errors": (
            "CheckpointError CommError CommTimeoutError ConfigError MismatchError NonFiniteError PeerLostError "
            "ThinwireError"
        ),
        "fusion": "FusedArray fuse",
        "integrations.hooks": "ddp_hook fsdp_hook",
        "optimizers": "AcSA Lamb OneBitAdam OneBitLamb Saga Svrg ZeroOneAdam",
        "replica.replica": "Replica",
        "strategies": (
            "ADPSGD AllReduce AsyncLeaderSGD BackupWorkers Choco CoCoD CompressedMomentum DecentLaM "
            "DoubleAveraging DQSGD EagerPushSum EASGD ExactDiffusion FetchSGD Gossip LeaderGradientDescent "
            "LeaderSGD Local LocalSGD MinibatchLocalSGD OverlapLocalSGD ParameterServer Probe PushSum QuasiGlobal "
            "SketchedSGD SlowMo Strategy Streaming ZeroOne"
        ),
        "strategies.gradients.bit_rules": "BitBudget ErrorBound FixedBits",
        "strategies.local.outer_optimizer": "OuterOptimizer",
        "strategies.recipe": "parse",
        "tensor2d.parallelize": "parallelize_2d",
        "topology": (
            "BaseGraph BipartiteExponential Complete DirectedExponential FromGraph Hierarchical Hypercube "
            "OnePeerExponential PPeerExponential RandomMatching Ring Star SymmetricExponential Topology Torus"
        ),
        "worker.worker": "Worker attach",
    }
)

_HOME = {name: module for module, names in PUBLIC_NAMES.items() for name in names.split()}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name from where it is defined, once."""
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    value: object = getattr(import_module(f"thinwire.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)

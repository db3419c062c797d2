# SPDX-License-Identifier: Apache-2.0
"""The racers that come with the benchmark, in the order in which they are run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from thin_gpt.referee import Entry

_HERE = Path(__file__).parent
_BITS = "codec=ErrorFeedback(Nearest(bits=4))"
_OUTER = "outer=OuterOptimizer('SGD', lr={outer}, momentum=0.9, nesterov=True)"
_PLAIN = "outer=OuterOptimizer('SGD', lr={outer})"
_SPARSE = "codec=ErrorFeedback(Gathered(ChunkedTopK(kept=64, chunk=4096, bits=2)), decay=0.95)"


def _torch(name: str, file: str, **options: Any) -> Entry:
    return Entry(name, str(_HERE / f"{file}.py"), **options)


def _ours(name: str, recipe: str, *, muon: bool = False, late: bool = False, **options: Any) -> Entry:
    settings = {"recipe": recipe, "muon": muon, "elastic": options.get("elastic", False), "late": late}
    outer = "{outer}" in recipe
    # Its kernels are compiled once, and kept in the user's cache.
    allow = ("disk", "processes")
    return _torch(f"thinwire-{name}", "thinwire_recipe", settings=settings, outer=outer, allow=allow, **options)


_TORCHFT = {"outer": True, "period": 32, "elastic": True, "allow": ("disk", "processes")}
_STREAMING = {"fragments": 2, "delay": 8, "alpha": 0.5}
ALL = (
    _torch("ddp", "ddp"),
    _torch("ddp-bf16", "bf16"),
    _torch("powersgd-4", "power_sgd"),
    _torch("post-local-sgd", "post_local_sgd", period=8),
    _torch("accelerate-local-sgd", "accelerate_local_sgd", period=8, allow=("disk",)),
    _torch("torchft-diloco", "torchft_diloco", **_TORCHFT),
    _torch("torchft-streaming", "torchft_diloco", settings=_STREAMING, **_TORCHFT),
    _torch("hivemind", "hivemind_averaging", period=32, replayable=False, allow=("disk", "processes")),
    _ours("allreduce-4bit", f"AllReduce({_BITS})"),
    _ours("localsgd-8-4bit", f"LocalSGD(period=8, {_BITS})", period=8),
    _ours("overlap-8-4bit", f"OverlapLocalSGD(period=8, {_BITS})", period=8),
    _ours("diloco-8", f"DiLoCo(period=8, {_BITS}, {_OUTER})", period=8),
    _ours("diloco-32", f"DiLoCo(period=32, {_BITS}, {_OUTER})", period=32),
    _ours("diloco-100", f"DiLoCo(period=100, {_OUTER})", period=100),
    _ours("muloco", f"DiLoCo(period=30, codec=ErrorFeedback(Nearest(bits=2)), {_OUTER})", muon=True, period=30),
    _ours("sparseloco", f"DiLoCo(period=30, {_PLAIN}, {_SPARSE})", period=30),
    _ours("noloco", "NoLoCo(period=50, lr={outer})", period=50),
    _ours("pushsum", "PushSum()"),
    # Workers of an elastic run are numbered as they arrive, and sums are rounded in that order.
    _ours("elastic-localsgd-8", f"LocalSGD(period=8, {_BITS})", period=8, elastic=True, replayable=False),
    _ours("late-diloco-32", f"DiLoCo(period=32, {_OUTER})", period=32, elastic=True, replayable=False, late=True),
)
RACERS = {entry.name: entry for entry in ALL}
NOT_RUN = {
    "gradientmail": "0.0.2 needs Python 3.12 or newer, runs the loop itself, and needs an S3 store inside the network"
}
"""What could be entered and is not, with the reason."""
_LIBRARIES = ("accelerate", "torchft", "hivemind", "thinwire")


def missing(name: str) -> str:
    """The library that a racer needs and that is not installed; empty if there is none."""
    library = name.split("-")[0]
    return library if library in _LIBRARIES and importlib.util.find_spec(library) is None else ""

# SPDX-License-Identifier: Apache-2.0
"""One strategy of each family on real processes, which do bit for bit what threads do."""

from __future__ import annotations

import torch

from tests.battery.cases import STRATEGIES
from tests.battery.runs import Setting, ended, together, with_
from tests.pool import run_processes
from thinwire import (
    DQSGD,
    EASGD,
    AllReduce,
    AsyncLeaderSGD,
    Choco,
    CoCoD,
    CompressedMomentum,
    DecentLaM,
    DiLoCo,
    EagerPushSum,
    FetchSGD,
    Gossip,
    LeaderSGD,
    LocalSGD,
    MinibatchLocalSGD,
    OverlapLocalSGD,
    Probe,
    PushSum,
    Sharded,
    SketchedSGD,
    SlowMo,
    Streaming,
    ZeroOne,
)

# On two workers Gloo adds in the order of ranks, as threads do.
KINDS = (
    *(AllReduce, DQSGD, SketchedSGD, FetchSGD, CompressedMomentum, ZeroOne),
    *(LocalSGD, MinibatchLocalSGD, CoCoD, OverlapLocalSGD, EASGD, SlowMo, DiLoCo, Sharded, Streaming),
    *(Gossip, DecentLaM, Choco, PushSum, EagerPushSum, LeaderSGD, AsyncLeaderSGD, Probe),
)


def settings() -> list[Setting]:
    """The first case of each."""
    cases = [next(each for each in STRATEGIES if type(each.strategy) is kind) for kind in KINDS]
    return [with_(each, dtype=torch.float64 if each.exact else torch.float32) for each in cases]


def on_a_process() -> list[list[float]]:
    return [ended(None, setting)[0].tolist() for setting in settings()]


def test_two_processes_do_bit_for_bit_what_threads_do() -> None:
    rows = run_processes(2, on_a_process)
    wrong = [
        str(setting.case)
        for place, setting in enumerate(settings())
        if [row[place] for row in rows] != together(setting).tolist()
    ]
    assert not wrong

# SPDX-License-Identifier: Apache-2.0
"""Simulated runs of the battery's cases."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.battery.runs import Case, Setting, begin, go_on, with_
from tests.problems import flat
from thinwire.planning import simulate
from thinwire.planning.simulate import Duration, Network, SimulatedComm, Special

UNEVEN = Network(
    bits_per_second=1e6,
    latency=1e-3,
    compute=Duration("lognormal", 0.01, 0.8),
    specials=(Special((1,), bits_per_second=2e5, slowdown=3.0),),
)
"""Slow links, one slower than the others, and workers that take their time."""


def setting_of(each: Case, size: int) -> Setting:
    """Eight steps of a case."""
    return with_(each, size=size, dtype=torch.float64 if each.exact else torch.float32)


def trained(comm: SimulatedComm, setting: Setting) -> Tensor:
    """One worker's parameters after a run in which each step takes its time."""
    worker = begin(comm, setting)
    comm.compute()
    go_on(worker, setting, after_step=lambda _: comm.compute())
    worker.detach()
    return flat(worker.model)


def simulated(setting: Setting, *, network: Network = UNEVEN, seed: int = 0) -> Tensor:
    """All workers' parameters, a row for each."""
    return torch.stack(simulate.run(setting.size, lambda comm: trained(comm, setting), network=network, seed=seed))

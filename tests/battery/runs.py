# SPDX-License-Identifier: Apache-2.0
"""One run of a case in every setting that the battery asks about, and a user's loop for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from tests.oracles.common import Descent
from tests.oracles.updates import AdamW, Update
from tests.problems import Regression, flat
from thinwire import Comm, Strategy, Worker
from thinwire.asynchronous.quorum.log import memberships
from thinwire.worker.worker import internals_of

Oracle = Callable[["Setting"], Tensor]
"""All workers' parameters at the end of a run, one row for each."""

SHAPES = [(5, 4), (4,), (4, 2), (2,)]
"""The shape of each parameter of the model that is trained."""
SIZES = [20, 4, 8, 2]
"""Its elements."""
PARTS = [slice(0, 24), slice(24, 34)]
"""The buckets that these are sent in."""
BUCKET_BYTES = 40


@dataclass(frozen=True)
class Case:
    """A strategy, and what is to be known of it.

    Attributes:
        strategy: with periods that end several times within a few steps.
        oracle: the method once more.
        optimizer: the only one that it takes; otherwise any of torch.
        refuses: what ends in a `ConfigError` before step 0: "momentum" (SGD's), "adamw" (torch's), "decay", "bf16", or
            a number of workers. Everything else must work.
        rate: the learning rate.
        exact: it computes in the dtype of the parameters, and not in fp32.
        lockstep: workers wait for each other after every step, so that a method that depends on timing does not.
        reproducible: two runs have the same bits, in lockstep.
        real: the run that is compared with the oracle; otherwise threads.
    """

    strategy: Strategy
    oracle: Oracle
    optimizer: type[torch.optim.Optimizer] | None = None
    refuses: frozenset[str | int] = frozenset()
    rate: float = 0.1
    exact: bool = True
    lockstep: bool = False
    reproducible: bool = True
    real: Callable[[Setting], Tensor] | None = None

    def __str__(self) -> str:
        return str(self.strategy)


def case(strategy: Strategy, oracle: Oracle, *refuses: str | int, **more: Any) -> Case:
    """One line of the table."""
    return Case(strategy, oracle, refuses=frozenset(refuses), **more)


@dataclass(frozen=True)
class Setting:
    """One question's run of a case.

    Attributes:
        case: what is run.
        size: the number of workers.
        dtype: of the parameters.
        steps: how many.
        factors: of the learning rates of parameter groups; parameters are assigned to the groups in turn.
        passes: backward passes of a step, over as many parts of the batch.
        momentum: of SGD.
        decay: weight decay.
        adamw: instead of SGD.
        log: the members of each step, where not all are; written by the run, read by the oracle.
    """

    case: Case
    size: int = 2
    dtype: torch.dtype = torch.float64
    steps: int = 8
    factors: tuple[float, ...] = (1.0,)
    passes: int = 1
    momentum: float = 0.0
    decay: float = 0.0
    adamw: bool = False
    log: list[Sequence[int]] = field(default_factory=list[Sequence[int]])

    @cached_property
    def problem(self) -> Regression:
        """Every worker's data."""
        return Regression(self.size, self.steps, self.dtype)

    @property
    def start(self) -> Tensor:
        """The first parameters, a row for each worker."""
        return self.problem.start.expand(self.size, -1)

    @property
    def plain_rates(self) -> list[float]:
        """A learning rate for each step; it rises, where the method's oracle has no rate of its own."""
        warm = [1.0] * self.steps if self.case.optimizer else [min(1.0, 0.4 + 0.2 * k) for k in range(self.steps)]
        return [self.case.rate * (0.1 if self.adamw else 1.0) * share for share in warm]

    @property
    def rates(self) -> list[float | Tensor]:
        """The same, as vectors where parameter groups have rates of their own."""
        if len(self.factors) == 1:
            return [*self.plain_rates]
        of = [self.factors[i % len(self.factors)] for i in range(len(SIZES))]
        spread = torch.cat([torch.full((n,), f, dtype=self.dtype) for n, f in zip(SIZES, of, strict=True)])
        return [rate * spread for rate in self.plain_rates]

    def update(self) -> Update:
        """Every worker's own optimizer, for an oracle."""
        if self.adamw:
            return AdamW(self.rates, decay=self.decay)
        return Descent(self.rates, momentum=self.momentum, decay=self.decay)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The real one."""
        parameters = list(model.parameters())
        groups = [{"params": parameters[i :: len(self.factors)]} for i in range(len(self.factors))]
        kind = torch.optim.AdamW if self.adamw else torch.optim.SGD
        if self.case.optimizer is not None and not self.adamw and not self.momentum:
            kind = self.case.optimizer
        more = {"momentum": self.momentum} if kind is torch.optim.SGD else {}
        return kind(groups, lr=self.case.rate, weight_decay=self.decay, **more)  # type: ignore[call-arg]

    def loss(self, model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
        """The mean over one part of a worker's batch, for the part's share of the step's gradient."""
        x, y = (each[step, rank].chunk(self.passes)[part] for each in self.problem.batches)
        return (model(x) - y).square().mean() / self.passes


def begin(comm: Comm | None, setting: Setting, *, elsewhere: bool = False) -> Worker:
    """Attach a model; elsewhere than where the run starts, if a checkpoint is to be loaded."""
    model = setting.problem.model()
    if elsewhere:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25)
    optimizer = setting.make_optimizer(model)
    return thinwire.attach(model, optimizer, setting.case.strategy, comm=comm, bucket_bytes=BUCKET_BYTES)


def go_on(
    worker: Worker, setting: Setting, last: int | None = None, *, after_step: Callable[[Worker], None] | None = None
) -> Worker:
    """A user's loop, up to a step; each reports its loss."""
    while worker.step < (setting.steps if last is None else last):
        step = worker.step
        for group, factor in zip(worker.optimizer.param_groups, setting.factors, strict=True):
            group["lr"] = setting.plain_rates[step] * factor
        worker.optimizer.zero_grad()
        total = torch.zeros((), dtype=setting.dtype, device="cpu")
        for part in range(setting.passes):
            with nullcontext() if part == setting.passes - 1 else worker.no_sync():
                loss = setting.loss(worker.model, worker.comm.rank, step, part)
                loss.backward()
            total += loss.detach()
        worker.record_batch(loss=total)
        worker.optimizer.step()
        if setting.case.lockstep:
            internals_of(worker).wait_pending()
        if after_step is not None:
            after_step(worker)
    return worker


def ended(comm: Comm | None, setting: Setting) -> tuple[Tensor, list[tuple[int, ...]]]:
    """One rank's whole run: its parameters, and the members of every step."""
    worker = go_on(begin(comm, setting), setting)
    worker.detach()
    return flat(worker.model), list(memberships(worker.replicas[0]))


def together(setting: Setting) -> Tensor:
    """All threads' parameters at the end, a row for each."""
    found = thinwire.run_threads(setting.size, lambda comm: ended(comm, setting), timeout=20)
    setting.log[:] = found[0][1]
    return torch.stack([row for row, _ in found])


def everything(worker: Worker) -> list[Tensor]:
    """All state of a run, as copies."""
    memories = [x for state in worker.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    states = [replica.state[name] for replica in worker.replicas for name in sorted(replica.state)]
    return [x.clone() for x in [flat(worker.model), *memories, *states]]


def alike(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors have the same bits."""
    return len(xs) == len(ys) and all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def with_(each: Case, **changes: Any) -> Setting:
    """A setting of a case."""
    return replace(Setting(each), **changes)


def smallest(each: Case) -> int:
    """The smallest number of workers, more than one, that a case has."""
    return next(size for size in (2, 3) if size not in each.refuses)


def usual(each: Case) -> int:
    """Three workers, so that not all are neighbors and shares are uneven, or two where three are refused."""
    return next(size for size in (3, 2) if size not in each.refuses)

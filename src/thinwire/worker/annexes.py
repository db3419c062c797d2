# SPDX-License-Identifier: Apache-2.0
"""Parts of `attach` that packages above this one register: the planner behind "auto", and the rounds of elastic runs.

Both use this package, so it cannot import them. `thinwire/__init__.py` registers them. This module imports neither
torch nor them, because `import thinwire` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from thinwire.core.comm.base import Comm
    from thinwire.core.view import View
    from thinwire.methods.strategies.base import Strategy
    from thinwire.worker.state import WorkerState

T = TypeVar("T")
Watch = Callable[[Any], object]
"""Called with the attached `Worker`; it may measure the first steps and switch to another strategy."""
Chooser = Callable[["Optimizer", "Mapping[str, nn.Parameter]", "Comm"], "tuple[Strategy, Watch | None]"]
"""Every rank calls it with the optimizer, the trained parameters and the comm; all get the same strategy."""


class Rounds(Protocol):
    """Runs the strategy's hooks in rounds that are repeated if a worker is lost, as elastic workers need."""

    def before_step(self, hook: Callable[[], None]) -> None:
        """Run the hook before the optimizer's step."""
        ...

    def after_step(self, hook: Callable[[], None]) -> None:
        """Run the hook after the optimizer's step."""
        ...


class Fleet(Protocol):
    """One worker's entry into an elastic run: a `thinwire.elastic.fleet.Fleet`."""

    @property
    def size(self) -> int:
        """The number of workers that the run begins with."""
        ...

    @property
    def request_seconds(self) -> float:
        """How long a message takes at least; 0 over connections."""
        ...

    def connect(self, timeout: float) -> Comm:
        """Enter a fixed run, and return the comm of its workers."""
        ...

    def publish(self, report: Callable[[], str]) -> None:
        """Let `thinwire watch` show what the function returns; a thread calls it every few seconds."""
        ...

    def withdraw(self) -> None:
        """Leave because this worker could not start."""
        ...


class ElasticOptions:
    """The base class of options of an elastic run, which `attach(elastic=...)` accepts in place of True."""

    def check(self, strategy: Strategy, optimizer: Optimizer, *, init: str, global_batch: int | None) -> None:
        """Check that a run with these options can train with this strategy.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """


class Elastic(Rounds, Protocol):
    """A worker's view of the other workers of an elastic run: a `thinwire.elastic.rounds.Elastic`.

    Attributes:
        costs: the costs of changes of view so far, by name, such as lost push-sum weight.
        on_view: functions that are called with each new view, on every worker in it.
    """

    costs: dict[str, float]
    on_view: list[Callable[[View], None]]

    @property
    def view(self) -> View:
        """The current view."""
        ...

    @property
    def comm(self) -> Comm:
        """The comm of the worker's replicas."""
        ...

    @property
    def worker_id(self) -> str:
        """This worker's id among `view.members`; unlike the rank it never changes."""
        ...

    @property
    def joins(self) -> bool:
        """Whether this worker joins a run that has begun, and has no state of it yet."""
        ...

    @property
    def has_just_joined(self) -> bool:
        """Whether this worker has joined the run and taken no step in it yet."""
        ...

    def crews(self) -> list[Any]:
        """Return which workers took part from which step on."""
        ...

    def agree(self, facts: list[tuple[str, str]], device: torch.device) -> None:
        """Check that all workers have equal settings, and that a joining worker has those of the run."""
        ...

    def begin(self, worker: WorkerState, after_step: Callable[[], None]) -> None:
        """Take over the worker, whose replicas are made."""
        ...

    def gradients(self, exchange: Callable[[], None]) -> None:
        """Run the exchange at the end of a backward pass as a round."""
        ...

    def start_step(self) -> None:
        """Begin a step, before its first message."""
        ...

    def together(self, body: Callable[[], T]) -> T:
        """Run what all workers do together, again if one of them is lost in it."""
        ...

    def drop_newcomers(self) -> None:
        """Forget which workers have just joined."""
        ...

    def withdraw(self) -> None:
        """Leave the run, which this worker could not start in."""
        ...


Enter = Callable[["Literal[True] | Fleet | ElasticOptions", float, "Comm | None"], Elastic]
"""Enters an elastic run, with a timeout in seconds; True reads from the environment which run it is.

The comm is that of this worker's own ranks, if it is a group.
"""


OpenRun = Callable[..., tuple[Fleet, bool]]
"""`thinwire.elastic.fleet.fleet_in_bucket`."""

_registered: dict[str, Callable[[], Any]] = {}


def register(*, chooser: Callable[[], Chooser], enter: Callable[[], Enter], open_run: Callable[[], OpenRun]) -> None:
    """Register what `attach` needs for "auto", `elastic` and `rendezvous`; each is imported when a worker needs it.

    Args:
        chooser: imports the planner and returns its chooser.
        enter: imports the elastic package and returns the function that enters a run.
        open_run: imports the elastic package and returns the function that opens a run in a bucket.
    """
    _registered.update(chooser=chooser, enter=enter, open_run=open_run)


def chooser() -> Chooser:
    """Return the planner's chooser, which all ranks call after they have agreed that all ask for it."""
    return _registered["chooser"]()


def enter() -> Enter:
    """Return the function that enters an elastic run, and connects with the workers of its current view."""
    return _registered["enter"]()


def open_run() -> OpenRun:
    """Return the function that opens a run in a bucket."""
    return _registered["open_run"]()

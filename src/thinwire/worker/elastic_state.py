# SPDX-License-Identifier: Apache-2.0
"""What an elastic worker knows of the others, for users."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from thinwire.errors import ConfigError
from thinwire.membership.view import View
from thinwire.quorum.elastic_sampler import Crew
from thinwire.worker.elastic import Elastic
from thinwire.worker.state import WorkerState

T = TypeVar("T")


class ElasticState(WorkerState):
    """What an elastic worker knows of the others.

    Attributes:
        elastic: the views, and the rounds that survive a loss; None where the ranks are fixed.
    """

    elastic: Elastic | None = None

    @property
    def view(self) -> View:
        """The workers that train together, under `attach(elastic=True)`; its `members` are in the order of ranks.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("view: only workers of attach(elastic=True) have views; use worker.comm.rank and .size")
        return self.elastic.view

    @property
    def worker_id(self) -> str:
        """This worker's id among `view.members`, under `attach(elastic=True)`; unlike the rank it never changes.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("worker_id: only workers of attach(elastic=True) have views; use worker.comm.rank")
        return self.elastic.worker_id

    @property
    def rank(self) -> int:
        """This worker's number among those that train together, from 0; under `elastic=True` it changes with views."""
        rank = None if self.elastic is None else self.elastic.view.rank(self.elastic.worker_id)
        return self.comm.rank if rank is None else rank

    @property
    def size(self) -> int:
        """How many workers train together; under `elastic=True` it changes with views."""
        return self.comm.size if self.elastic is None else self.elastic.view.size

    @property
    def has_just_joined(self) -> bool:
        """Whether this worker has joined an elastic run and taken no step in it yet."""
        return self.elastic is not None and self.elastic.has_just_joined

    @property
    def crews(self) -> list[Crew]:
        """Who took part from which step on, under `attach(elastic=True)`; by it `ElasticSampler.share` deals the data.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError(
                "crews: only workers of attach(elastic=True) have views; all ranks take part in all steps"
            )
        return self.elastic.crews()

    def on_view(self, call: Callable[[View], None]) -> None:
        """Call a function with each new view, on every worker in it, between two steps or in a step that is repeated.

        Args:
            call: such as one that divides the data anew; it must not communicate.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("on_view: only workers of attach(elastic=True) have views")
        self.elastic.on_view.append(call)

    def _before(self, hook: Callable[[], None]) -> None:
        hook() if self.elastic is None else self.elastic.before_step(hook)

    def _after(self, hook: Callable[[], None]) -> None:
        hook() if self.elastic is None else self.elastic.after_step(hook)

    def _together(self, call: Callable[[], T]) -> T:
        """What all ranks do together; an elastic worker does it again where one is lost in it.

        A backward pass that has failed is ended before, in a round of its own: others may have been in one meanwhile.
        """
        self.end_failed_pass()
        return call() if self.elastic is None else self.elastic.together(call)

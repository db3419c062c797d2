# SPDX-License-Identifier: Apache-2.0
"""A view: one numbered list of the workers that train together, and what each of them knew when it was made."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.errors import CommError


@dataclass(frozen=True)
class Progress:
    """How far a worker is, as it tells the others when a view ends.

    Workers take rounds in one order: a round is whatever ends with a message of each worker to all that it has its
    result. So nobody is more than one round ahead of another, and nobody is in the next round before all have the
    result of this one.

    Attributes:
        round: of the rounds that workers make together, the number of the last one that this worker has begun.
        done: whether it has that round's result.
        step: optimizer steps done.
        ready: False for one that has joined, and has not got the others' state yet.
        left: why it leaves with notice, such as a signal's name; empty for one that goes on.
        unconnected: whether it could not open its connections in the view that ends, before anybody gave that view up.

    Example:
        >>> from thinwire.membership.view import Progress, settled
        >>> settled([Progress(7, True, 3), Progress(7, True, 3)])
        7
        >>> settled([Progress(7, True, 3), Progress(7, False, 3)])
        6
        >>> settled([Progress(8, False, 3), Progress(7, True, 3)])  # somebody is in the next round already
        7
    """

    round: int
    done: bool
    step: int
    ready: bool = True
    left: str = ""
    unconnected: bool = False


def settled(workers: Collection[Progress]) -> int:
    """The last round whose result all survivors keep; they repeat the next one, as far as they have begun it."""
    last = max(each.round for each in workers)
    # Who is a round behind may have put it back already, in a view that ended before all had connected.
    return last if all(each.round == last and each.done for each in workers) else last - 1


@dataclass(frozen=True)
class View:
    """The workers that train together from some moment on; their order gives the ranks.

    Attributes:
        epoch: the number of the view, from 0.
        members: the workers' ids, in the order of ranks.
        joined: those of them that were not in the view before.
        lost: those that were in the view before, and are not in this one, without notice.
        left: those that have left with notice, and why.
        progress: of each member of the view before that is in this one too.
        rows: where each member's process runs, as `comm.liveness.own_row` in hexadecimal digits.
        requests: how many workers had asked to join so far.
        donor: who has sent its state to those that joined, before they came; empty if they get it in this view.
        begins: the number of the view that the run began as: 0, unless all workers were lost before the first step.

    Example:
        >>> view = View(1, ("a", "c"), lost=("b",), progress={"a": Progress(7, True, 3)})
        >>> View.read(view.text()) == view, view.rank("c"), view.rank("b")
        (True, 1, None)
    """

    epoch: int
    members: tuple[str, ...]
    joined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict[str, str])
    progress: Mapping[str, Progress] = field(default_factory=dict[str, Progress])
    rows: Mapping[str, str] = field(default_factory=dict[str, str])
    requests: int = 0
    donor: str = ""
    begins: int = 0

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.members)

    def rank(self, worker: str) -> int | None:
        """The rank of a worker; None if it is not in the view."""
        return self.members.index(worker) if worker in self.members else None

    @property
    def ready(self) -> dict[str, Progress]:
        """The progress of the members that have a state to go on from."""
        return {
            each: self.progress[each] for each in self.members if each in self.progress and self.progress[each].ready
        }

    def text(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, stored: bytes | str) -> View:
        """What `text` returned.

        Raises:
            CommError: it is something else.
        """
        try:
            found: dict[str, Any] = json.loads(stored)
            progress = {name: Progress(**each) for name, each in found.pop("progress").items()}
            for name in ("members", "joined", "lost"):
                found[name] = tuple(found[name])
            return cls(**found, progress=progress)
        except (TypeError, KeyError, ValueError) as error:
            raise CommError(f"the store holds a view that cannot be read ({error}); use a store of its own") from None

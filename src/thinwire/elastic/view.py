# SPDX-License-Identifier: Apache-2.0
"""A view: one numbered list of the workers that train together, and what each of them knew when it was made."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from thinwire.core.comm.liveness import ROW_BYTES
from thinwire.core.validation import printable
from thinwire.errors import CommError

_ID = re.compile(r"[!-~]{1,64}")
_ROW = re.compile(f"([0-9a-f]{{{2 * ROW_BYTES}}})?")
_REASON_LENGTH = 200


def is_worker(found: object) -> TypeGuard[Sequence[str]]:
    """Whether something is the id and the process of a worker, as they are stored."""
    return (
        isinstance(found, list | tuple)
        and len(found) == 2
        and all(isinstance(each, str) for each in found)
        and _ID.fullmatch(found[0]) is not None
        and _ROW.fullmatch(found[1]) is not None
    )


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
        averages: of the last averages whose result it has, the number of the round, and how many steps of all workers
            are in the result.
        in_step: whether it has begun the step after `step`.

    Example:
        >>> from thinwire.elastic.view import Progress, settled
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
    averages: tuple[tuple[int, int], ...] = ()
    in_step: bool = False

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Progress:
        """Return what was stored as a dictionary."""
        averages = tuple((int(a), int(b)) for a, b in found.get("averages", ()))
        left = printable(str(found.get("left", "")), _REASON_LENGTH)
        content: dict[str, Any] = {**found, "averages": averages, "left": left}
        return cls(**content)


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
        >>> View.read(view.content()) == view, view.rank("c"), view.rank("b")
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

    def content(self) -> dict[str, Any]:
        """As it is stored."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> View:
        """What `content` returned.

        Raises:
            CommError: it is something else.
        """
        try:
            found = dict(stored)
            progress = {name: Progress.read(each) for name, each in found.pop("progress").items()}
            for name in ("members", "joined", "lost"):
                found[name] = tuple(found[name])
            found["left"] = {name: printable(str(why), _REASON_LENGTH) for name, why in found["left"].items()}
            view = cls(**found, progress=progress)
            ids = [*view.members, *view.joined, *view.lost, *view.left, *progress]
            if not all(is_worker((each, view.rows.get(each, ""))) for each in ids):
                raise ValueError("an id or a process is not of the right form")
            return view
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CommError(f"the store holds a view that cannot be read ({error}); use a store of its own") from None

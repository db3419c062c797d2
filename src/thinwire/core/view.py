# SPDX-License-Identifier: Apache-2.0
"""A view: a numbered list of the workers that train together, with the progress of each."""

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
_ROW = re.compile(f"([0-9a-f]{{{2 * ROW_BYTES}}})*")
_REASON_LENGTH = 200


def is_worker(found: object) -> TypeGuard[Sequence[str]]:
    """Return True if the object is a stored id and process of a worker."""
    return (
        isinstance(found, list | tuple)
        and len(found) == 2
        and all(isinstance(each, str) for each in found)
        and _ID.fullmatch(found[0]) is not None
        and _ROW.fullmatch(found[1]) is not None
    )


def rows_in(row: str) -> list[str]:
    """Return the locations of a worker's processes: several if the worker is a group of ranks."""
    return [row[start : start + 2 * ROW_BYTES] for start in range(0, len(row), 2 * ROW_BYTES)]


@dataclass(frozen=True)
class Progress:
    """The progress of a worker, as it reports it at the end of a view.

    All workers take the rounds in one order. A round ends with a message of each worker to all others that it has the
    result. So no worker is more than one round ahead of another, and no worker is in the next round before all have the
    result of this one.

    Attributes:
        round: the number of the last common round that this worker has started.
        done: whether the worker has that round's result.
        step: optimizer steps done.
        ready: False for a worker that has joined and does not have the others' state yet.
        left: the reason for a graceful shutdown, such as a signal's name; empty if the worker continues.
        unconnected: whether it could not connect in the view that ends, before any worker abandoned that view.
        averages: for each of the last averages whose result it has, the number of the round and the steps of all
            workers in the result.
        in_step: whether it has started the step after `step`.

    Example:
        >>> from thinwire.core.view import Progress, last_kept_round
        >>> last_kept_round([Progress(7, True, 3), Progress(7, True, 3)])
        7
        >>> last_kept_round([Progress(7, True, 3), Progress(7, False, 3)])
        6
        >>> last_kept_round([Progress(8, False, 3), Progress(7, True, 3)])  # one worker is in the next round already
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
        """Parse a stored dictionary."""
        averages = tuple((int(a), int(b)) for a, b in found.get("averages", ()))
        left = printable(str(found.get("left", "")), _REASON_LENGTH)
        content: dict[str, Any] = {**found, "averages": averages, "left": left}
        return cls(**content)


def last_kept_round(workers: Collection[Progress]) -> int:
    """Return the last round whose result all survivors keep; they repeat the next one."""
    last = max(each.round for each in workers)
    # A worker that is a round behind may have undone it already, in a view that ended before all had connected.
    return last if all(each.round == last and each.done for each in workers) else last - 1


@dataclass(frozen=True)
class View:
    """The workers that train together from some point on, in rank order.

    Attributes:
        epoch: the number of the view, from 0.
        members: the workers' ids, in rank order.
        joined: members that were not in the previous view.
        lost: members of the previous view that were lost.
        left: members of the previous view that left gracefully, with the reason.
        progress: the progress of each member that was in the previous view.
        rows: the locations of each member's processes, one after the other: `comm.liveness.own_row` of each in
            hexadecimal digits.
        requests: the number of join requests so far.
        donor: the worker that sent its state to the joining workers in advance; empty if they get it in this view.
        begins: the number of the run's first view: 0, unless all workers were lost before the first step.

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
        """Return the number of workers."""
        return len(self.members)

    def rank(self, worker: str) -> int | None:
        """Return the rank of a worker; None if it is not in the view."""
        return self.members.index(worker) if worker in self.members else None

    @property
    def ready(self) -> dict[str, Progress]:
        """Return the progress of the members that have a state."""
        return {
            each: self.progress[each] for each in self.members if each in self.progress and self.progress[each].ready
        }

    def content(self) -> dict[str, Any]:
        """Return the view as it is stored."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> View:
        """Parse the result of `content`.

        Raises:
            CommError: the data are not a view.
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
                raise ValueError("an id or a process has the wrong form")
            return view
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CommError(f"the store holds a view that cannot be read ({error}). Use a separate store") from None

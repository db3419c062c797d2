# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of workers whose rounds close without late ones: each saves alone, in a folder `worker-NNNN`.

Workers save at steps of their own, so their checkpoints lie in different rounds. A run continues from the newest round
that any of them has saved. A worker that had started its steps in an earlier round continues them: its contribution is
late then, as it would have been without the stop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.storage.rank_file import RankFile
from thinwire.errors import CheckpointError
from thinwire.worker.checkpoint import check_kind, facts_of, whole_steps
from thinwire.worker.replica_state import is_count, mapping_of

_FOLDER = re.compile(r"worker-([0-9]{4,9})")


def folder_of(name: str) -> str:
    """Return the name of the folder in which a worker saves."""
    return f"worker-{int(name):04d}"


@dataclass(frozen=True)
class Saved:
    """One worker's checkpoint.

    Attributes:
        name: the worker that has saved it.
        step: of the worker.
        run: the id of its run.
        round: the open round, as far as this worker knew.
        sent: the number of contributions that it had sent.
    """

    name: str
    step: int
    run: str
    round: int
    sent: int

    @property
    def age(self) -> tuple[int, int, str, int]:
        """Return what orders checkpoints: the newest one is largest."""
        return self.round, self.step, self.run, -int(self.name)

    def content(self) -> list[Any]:
        """Return the checkpoint's description as JSON values."""
        return [self.name, self.step, self.run, self.round, self.sent]

    def home(self, folder: Path) -> Path:
        """Return the folder of the checkpoint in that of all workers."""
        return folder / folder_of(self.name) / f"step-{self.step:08d}"

    def read(self, folder: Path) -> dict[str, Any]:
        """Return what the worker has saved.

        Raises:
            CheckpointError: it is damaged, or is not of this save.
        """
        file = RankFile(self.home(folder), 0)
        content = mapping_of(file.read(), "a part")
        if _describe(file, self.step, content)[0] != self:
            raise CheckpointError(f"{file.path}: it was overwritten while it was loaded. Load it again")
        return content


def taken_of(counts: Sequence[Sequence[int]]) -> set[int]:
    """Return the numbers of a worker's contributions that closings have taken.

    Args:
        counts: the number of contributions that were read in their order, as a list; those of them that no closing
            has taken; and further ones that closings have taken.
    """
    (read,), waiting, further = counts
    return {*range(read), *further} - set(waiting)


def _describe(file: RankFile, step: int, content: Mapping[str, Any]) -> tuple[Saved, dict[str, int]]:
    """Return the description of a checkpoint, and how many contributions of each worker it must have sent by then."""
    if "late" not in content:
        raise CheckpointError(f"{file.path}: is of a run without LateMerging. Give each run a folder of its own")
    late, facts = mapping_of(content["late"], "the rounds"), facts_of(content)
    name, counts = late.get("name"), mapping_of(late.get("counts"), "the counts")
    known = is_count(late.get("round")) and is_count(late.get("sent")) and isinstance(late.get("run"), str)
    if not known or not isinstance(name, str) or not name.isdecimal() or facts["step"] != step:
        raise CheckpointError(f"{file.path}: has no round, worker and run. Remove {file.home}")
    saved = Saved(name, step, late["run"], late["round"], late["sent"])
    return saved, {each: 1 + max(taken_of(found), default=-1) for each, found in counts.items()}


def find(folder: Path) -> dict[str, Any]:
    """Return the newest visible checkpoint of each worker, and what the newest of all has taken, as JSON values.

    Raises:
        CheckpointError: one of them is damaged.
    """
    found = list[tuple[Saved, dict[str, int]]]()
    for home in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _FOLDER.fullmatch(home.name)
        steps = whole_steps(home, 0) if match and home.name == folder_of(match[1]) else []
        if match and steps:
            file = RankFile(home / f"step-{steps[-1]:08d}", 0)
            saved, taken = _describe(file, steps[-1], mapping_of(file.outline(), "a part"))
            if saved.name != str(int(match[1])):
                raise CheckpointError(
                    f"{file.path}: is the checkpoint of worker {saved.name}. Copy it to its own folder"
                )
            found.append((saved, taken))
    taken = max(found, key=lambda each: each[0].age)[1] if found else {}
    return {"saves": [saved.content() for saved, _ in found], "taken": taken}


def extra_of_newest(folder: Path, *, missing_ok: bool) -> dict[str, Any]:
    """Return the `extra` of the newest visible checkpoint, for a worker that joins.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    newest = _newest(folder)
    if newest is not None:
        return dict(mapping_of(newest.read(folder)["extra"], "extra"))
    if missing_ok:
        return {}
    raise missing(folder)


def saved_step(folder: Path) -> int | None:
    """Return the step of the newest visible checkpoint; None if there is none.

    Raises:
        CheckpointError: one of them is damaged.
    """
    newest = _newest(folder)
    return None if newest is None else newest.step


def newest_home(folder: Path) -> Path | None:
    """Return the folder of the newest visible checkpoint; None if there is none.

    Raises:
        CheckpointError: one of them is damaged, or others are of a run without `LateMerging`.
    """
    newest = _newest(folder)
    if newest is None:
        return None
    check_kind(folder, alone=True)
    return newest.home(folder)


def _newest(folder: Path) -> Saved | None:
    return max((Saved(*each) for each in find(folder)["saves"]), key=lambda each: each.age, default=None)


def missing(folder: Path) -> CheckpointError:
    """Return the error if no worker sees a checkpoint."""
    return CheckpointError(
        f"{folder}: no worker finds a checkpoint in a worker-* folder. Check the path, or pass missing_ok=True"
    )


@dataclass(frozen=True)
class Plan:
    """Which worker continues from which checkpoint.

    Attributes:
        newest: the one whose common parameters all continue from.
        saves: by the name of the worker that continues from it; others start like workers that join.
        outdated: the names of workers whose checkpoint is older than work of them that the newest one contains.
        dropped: the names of workers whose checkpoint no worker continues, since there are fewer workers.
    """

    newest: Saved
    saves: dict[str, Saved]
    outdated: list[str]
    dropped: list[str]


def plan(rows: Mapping[str, Mapping[str, Any]]) -> Plan | None:
    """Assign the checkpoints of one run to workers, each to one that sees it; None if there is none.

    Args:
        rows: by the name of each worker, what `find` has returned there.
    """
    seen = {name: [Saved(*each) for each in row["saves"]] for name, row in rows.items()}
    everything = {saved for saves in seen.values() for saved in saves}
    if not everything:
        return None
    newest = max(everything, key=lambda each: each.age)
    taken: Mapping[str, int] = next(row["taken"] for name, row in rows.items() if newest in seen[name])
    last: dict[str, Saved] = {}
    for saved in sorted(everything, key=lambda each: each.age):
        if saved.run == newest.run:  # others are of an earlier run
            last[saved.name] = saved
    outdated = [name for name, saved in last.items() if taken.get(name, 0) > saved.sent]
    usable = sorted((last[name] for name in last if name not in outdated), key=lambda each: each.age, reverse=True)
    saves: dict[str, Saved] = {}

    def give(saved: Saved, names: Iterable[str]) -> None:
        free = [name for name in names if name not in saves and saved in seen.get(name, ())]
        if free and saved not in saves.values():
            saves[free[0]] = saved

    names, chosen = sorted(rows, key=int), usable[: len(rows)]
    give(newest, [newest.name, *names])
    for saved in chosen:
        give(saved, [saved.name])
    for saved in sorted(chosen, key=lambda each: int(each.name)):
        give(saved, names)
    dropped = {saved.name for saved in usable} - {saved.name for saved in saves.values()}
    return Plan(newest, saves, sorted(outdated, key=int), sorted(dropped, key=int))

"""A replica's party: for strategies whose steps end before everyone is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from thinwire.comm.base import Comm
from thinwire.comm.counting import CountingComm
from thinwire.errors import ConfigError
from thinwire.quorum.counted import CountedParty
from thinwire.quorum.participant import Party
from thinwire.quorum.reduction_selector import Plane, Planes
from thinwire.quorum.rules import Choice, Rule
from thinwire.replica.replica import Replica

_parties: WeakKeyDictionary[Replica, Party | CountedParty] = WeakKeyDictionary()


class Recipe(Protocol):
    """What a strategy says of its arrivals."""

    @property
    def backups(self) -> int:
        """The most workers that a step goes without."""
        ...

    @property
    def choice(self) -> Choice:
        """How it is chosen for whom to wait."""
        ...

    @property
    def deviations(self) -> float:
        """Of a deadline."""
        ...

    @property
    def plane(self) -> Plane:
        """By which way members add up."""
        ...

    @property
    def keeper(self) -> int:
        """The rank that decides."""
        ...

    @property
    def patience_seconds(self) -> float:
        """The least time before a member says that it waits."""
        ...


def open_party(r: Replica, recipe: Recipe, *, names: Sequence[str]) -> None:
    """Let all ranks' replicas meet; `party_of(r)` is this rank's side from then on.

    Args:
        r: the replica.
        recipe: for whom to wait.
        names: of the replica's state, those that a late rank must be given.

    Raises:
        ConfigError: of a part of a replica; or as `Comm.open_mailbox`.
    """
    rule = Rule(r.comm.size, r.comm.size - recipe.backups, recipe.choice, recipe.deviations)
    if isinstance(r.comm, CountingComm):
        _parties[r] = CountedParty(r, rule, recipe.plane, keeper=recipe.keeper)
        return
    aside = _aside(r, recipe.plane)
    planes = Planes(recipe.plane if aside is not None else "ring")
    _parties[r] = Party(
        r, rule, planes, aside, keeper=recipe.keeper, patience_seconds=recipe.patience_seconds, names=names
    )


def _aside(r: Replica, plane: Plane) -> Comm | None:
    """Connections for all-reduces, where the wire has some; it must only where nothing else is asked for."""
    if plane == "ring":
        return None
    try:
        return r.comm.duplicate()
    except ConfigError:
        if plane == "zeros":
            raise
        return None


def party_of(r: Replica) -> Party | CountedParty:
    """The party that was opened for a replica.

    Raises:
        ConfigError: none was.
    """
    if r not in _parties:
        raise ConfigError("no arrivals are counted for this replica; attach the model to BackupWorkers(...) itself")
    return _parties[r]

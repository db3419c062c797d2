# SPDX-License-Identifier: Apache-2.0
"""The entry of one worker into a run whose workers find each other in a store: its store, its id and its rank."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from thinwire.core.comm.base import Comm
from thinwire.core.comm.bucket import BucketComm, BucketConnector
from thinwire.core.comm.liveness import own_row
from thinwire.core.comm.rendezvous import view_store
from thinwire.core.comm.roll_call import Store, within
from thinwire.core.comm.view_group import GlooConnector
from thinwire.core.storage.bucket import Bucket, BucketStore
from thinwire.elastic.elastic_comm import Connector
from thinwire.elastic.late import LateMerging
from thinwire.elastic.membership import Membership
from thinwire.elastic.objects import BucketObjects, Objects, StoreObjects
from thinwire.elastic.ranks import Ranks
from thinwire.elastic.records import hidden, run_token
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError
from thinwire.worker.annexes import ElasticOptions
from thinwire.worker.handshake import Facts, first_difference, gather_texts

BEAT_SECONDS = 5.0
"""Between two heartbeats of a worker of a run over a bucket."""
_entered: Counter[str] = Counter()


@dataclass(frozen=True)
class Fleet:
    """The entry of one worker into an elastic run.

    Attributes:
        membership: agrees on views with the other workers.
        connector: opens the connections of each view.
        rank: the rank of this worker, if the run starts; None takes the first free one.
        size: the number of workers at the start of the run.
        entered: the run of the environment, and how many runs this process had entered before; None without one.
        request_seconds: how long a message takes at least; 0 over connections.
        objects: carries the contributions of workers whose rounds close without late ones.
        late: how these rounds close; None for rounds that all workers end together.
        ranks: the ranks of this worker if it is a group; None if it is one process.
    """

    membership: Membership
    connector: Connector
    rank: int | None
    size: int
    entered: tuple[str, int] | None = None
    request_seconds: float = 0.0
    objects: Objects | None = None
    late: LateMerging | None = None
    ranks: Ranks | None = None

    def connect(self, timeout: float) -> BucketComm:
        """Enter a fixed run, and return the comm of its workers.

        Raises:
            CommError: not all workers arrived.
            ConfigError: all of them are there already.
        """
        try:
            view = self.membership.enter(self.rank, self.size)
        except BaseException:
            self.withdraw()
            raise
        rank = view.rank(self.membership.worker)
        assert rank is not None and isinstance(self.connector, BucketConnector)
        return self.connector.connect_fixed(
            view.epoch, rank, view.size, timeout=timeout, lost=self.membership.are_gone, on_close=self.membership.close
        )

    def agree(self, facts: Facts) -> None:
        """Refuse to train in a run of another model or recipe, or one whose rounds close in another way.

        Raises:
            MismatchError: with the first difference.
        """
        # The number of workers is the one of this moment, and `elastic` does not tell how rounds close.
        same = [fact for fact in facts if fact[0] not in ("the number of workers", "elastic")]
        mine = json.dumps([("elastic", str(self.late or True)), *same])
        theirs = self.membership.facts(mine)
        if theirs != mine:
            difference = first_difference(json.loads(theirs), json.loads(mine), "the first worker", "this worker")
            raise MismatchError(
                f"worker {self.membership.worker} joins a run that was started otherwise: {difference}. Start all "
                "workers of a run with the same settings, or give this one another run"
            )

    def publish(self, report: Callable[[], str]) -> None:
        """Let the heartbeats of this worker carry a report."""
        self.membership.report = report

    def withdraw(self) -> None:
        """Leave because this worker could not start; the next attach of this process enters the same run."""
        self.membership.withdraw()
        if self.entered is not None:
            run, before = self.entered
            if _entered[run] == before + 1:  # no other run was entered since
                _entered[run] = before


def fleet_from_environment(
    store: Any = None, *, late: LateMerging | None = None, timeout: float = 60.0, group: Comm | None = None
) -> Fleet:
    """Make the entry of this process into the run of its environment.

    The variables: `THINWIRE_STORE`, the address of the store, unless torchrun's agent hosts one; `THINWIRE_RUN`, the
    name of the run in it; `THINWIRE_WORKERS`, the number of workers at the start (default `WORLD_SIZE`); and
    `THINWIRE_RANK`, this worker's rank at the start (default `RANK`). `THINWIRE_TOKEN` is a secret of the run, the same
    on all workers. It distinguishes their records in the store from foreign ones. Without it the first worker draws one
    and publishes it in the store.

    Args:
        store: a `torch.distributed.Store` that outlives every worker; None uses the store of the variables.
        late: how rounds close without late workers; None for rounds that all workers end together.
        timeout: the limit for answers of the store and the other workers, in seconds.
        group: the ranks of this worker, if it is a group. Then the variables of torchrun describe these ranks and not
            the run: THINWIRE_STORE must be given, THINWIRE_WORKERS is the number of groups at the start (default 1),
            and THINWIRE_RANK that of this group (default: the first free one).

    Raises:
        ConfigError: no store outlives the workers, or a variable is not a number.
        CommTimeoutError: the store cannot be reached.
    """
    if group is None:
        size = _number("THINWIRE_WORKERS", _number("WORLD_SIZE", 1))
        rank = _number("THINWIRE_RANK", _number("RANK", 0))
    else:
        _check_ranks_of(group)
        size = _number("THINWIRE_WORKERS", 1)
        rank = _number("THINWIRE_RANK", 0) if "THINWIRE_RANK" in os.environ else None
        if store is None and "THINWIRE_STORE" not in os.environ:
            raise ConfigError(
                "elastic=True with a group: THINWIRE_STORE is not set. The groups of a run need one store that "
                "outlives all of them. Start `thinwire store` and set THINWIRE_STORE to the address that it prints"
            )
    if rank is not None and not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} workers: THINWIRE_RANK (or RANK) must lie in 0..{size - 1}")
    run = os.environ.get("THINWIRE_RUN", "run")
    if "THINWIRE_STORE" not in os.environ and store is None:
        # A torchrun agent that restarts its workers starts a new run with them.
        run += f"-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # A process may attach several models, one after the other; each is a separate run.
    before = _entered[run]
    views = view_store(f"thinwire/elastic/{run}/{before}", store, several=size > 1, timeout=timeout)
    try:
        token = within(timeout, lambda: run_token(cast(Store, views)))
    except (RuntimeError, OSError) as error:  # TimeoutError too
        first = (str(error) or "no answer").splitlines()[0][:200]
        raise CommTimeoutError(f"the store of workers does not answer within {timeout:g} s ({first})") from None
    _entered[run] += 1  # not earlier, since a failed entry is repeated
    worker, part, ranks = f"{'group' if rank is None else rank}-{secrets.token_hex(4)}", "", None
    told: dict[str, Any] = {}  # of a group, for its membership
    if group is not None and group.size > 1:  # a single rank is a worker like any other
        settings = {"THINWIRE_RUN": run, "THINWIRE_WORKERS": size, "THINWIRE_RANK": rank}
        ranks, told = _members_of(group, worker, settings)
        worker, part = ranks.worker, f"{group.rank}/"
    kind = "elastic" if late is None else "late"
    membership = Membership(views, worker, timeout=timeout, token=token, kind=kind, **told)
    connector = GlooConnector(views, lambda name: hidden(token, f"{part}{name}"))
    objects = StoreObjects(cast(Store, views), token)
    return Fleet(membership, connector, rank, size, (run, before), objects=objects, late=late, ranks=ranks)


def _check_ranks_of(group: Comm) -> None:
    if group.check_device.type != "cpu":
        raise ConfigError(
            f"a worker that is a group over {group.check_device.type} only: its ranks exchange CPU tensors. Start it "
            "with init_process_group('cpu:gloo,cuda:nccl')"
        )


def _members_of(group: Comm, worker: str, settings: Mapping[str, object]) -> tuple[Ranks, dict[str, Any]]:
    """Return the ranks of a group, with the id that its first rank has drawn, and their arguments of `Membership`.

    Raises:
        ConfigError: a variable differs between the ranks.
    """
    mine = json.dumps([worker, own_row().hex(), {name: str(value) for name, value in settings.items()}])
    told = [json.loads(text) for text in gather_texts(group, mine.encode(), torch.device("cpu"))]
    for rank, (_, _, theirs) in enumerate(told):
        for name, value in theirs.items():
            if value != told[0][2][name]:
                raise ConfigError(
                    f"{name} is {told[0][2][name]} on rank 0 and {value} on rank {rank} of one group. Set it to the "
                    "same value on all ranks of the group"
                )
    return Ranks(group, told[0][0]), {"rank": group.rank, "row": "".join(row for _, row, _ in told)}


def fleet_in_bucket(
    url: str,
    *,
    key: str | None = None,
    workers: int | None = None,
    elastic: bool | ElasticOptions = False,
    timeout: float = 60.0,
    group: Comm | None = None,
) -> tuple[Fleet, bool]:
    """Make the entry of this process into the run at a URL of an object store or a shared folder.

    Args:
        url: as for `Bucket.open`.
        key: the run key; by default that of THINWIRE_KEY.
        workers: the number of workers at the start of the run; by default that of THINWIRE_WORKERS. Without either the
            run is elastic and starts with one worker.
        elastic: whether the run continues without lost workers, and lets further workers join; or `LateMerging`.
        timeout: the limit for answers of the store and the other workers, in seconds.
        group: the ranks of this worker, if it is a group.

    Returns:
        The entry, and whether the run is fixed: it has these workers from start to end.

    Raises:
        ConfigError: a setting is invalid, or the store or the key cannot be used; see `Bucket.open`.
        CommError: the store cannot be reached.
    """
    size = _number("THINWIRE_WORKERS", 0) if workers is None else workers
    if size < 0 or (size == 0 and workers is not None):
        raise ConfigError(f"workers={size}: must be at least 1. Leave it out to let workers join at any time")
    fixed, size = size > 0 and not elastic, max(size, 1)
    rank = _number("THINWIRE_RANK", -1)
    if rank >= size:
        raise ConfigError(f"THINWIRE_RANK={rank} of {size} workers: must lie in 0..{size - 1}")
    late = elastic if isinstance(elastic, LateMerging) else None
    part, ranks = "", None
    told: dict[str, Any] = {}  # of a group, for its membership
    worker = f"{'w' if rank < 0 else rank}-{secrets.token_hex(4)}"
    if group is not None and group.size > 1:
        _check_ranks_of(group)
        ranks, told = _members_of(group, worker, {"rendezvous": url, "workers": size, "THINWIRE_RANK": rank})
        worker, part = ranks.worker, f"/{group.rank}" if group.rank else ""
        if fixed:  # the ranks of its groups are as many fixed runs
            ranks, told = None, {}
        if fixed and rank < 0:
            raise ConfigError(
                f"{size} groups with rendezvous: THINWIRE_RANK is not set. All ranks of a group need the number of the "
                f"group. Set it to a number from 0 to {size - 1}"
            )
    bucket = Bucket.open(url, key=key, timeout=timeout)
    # A process may attach several models, one after the other; each is a separate run. In memory, workers are threads.
    before = _entered[url]
    _entered[url] += not url.startswith("memory:")
    remote = not url.startswith(("file:", "memory:"))
    membership = Membership(
        # The ranks of a fixed run's groups are as many fixed runs: a loss in one of them ends its group, and so all.
        BucketStore(bucket, f"{before}{part}" if fixed else str(before)),
        worker,
        timeout=timeout,
        beat_seconds=BEAT_SECONDS if remote else 1.0,
        poll_seconds=0.2 if remote else 0.02,
        kind="fixed" if fixed else "elastic" if late is None else "late",
        connected=False,
        **told,
    )
    close_at_exit(membership.close)
    # Names have the members, so that a view that an attacker has restored shares no objects with another one.
    connector = BucketConnector(bucket, f"{before}/calls{part}", lambda: " ".join(membership.current.members))
    objects, entered = BucketObjects(bucket, str(before), timeout=timeout), (url, before)
    first = None if rank < 0 else rank
    return Fleet(membership, connector, first, size, entered, bucket.seconds, objects, late, ranks), fixed


def close_at_exit(close: Callable[[], None]) -> None:
    """Call a method when this process ends, so that the other workers know; its object is not kept for that."""
    held, process = weakref.WeakMethod(close), os.getpid()

    def run() -> None:
        if os.getpid() == process and (found := held()) is not None:
            found()

    atexit.register(run)


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return otherwise
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: must be a whole number")
    return int(text)

# SPDX-License-Identifier: Apache-2.0
"""The communication calls that every backend provides.

Every call returns a `Work`; its `wait()` returns the result. Do not read or write a tensor that you passed to a call
before that wait. Bytes are counted here from the tensors themselves, so that all backends (process group, threads,
counter) report the same numbers.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import ClassVar, Literal, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.runtime import REAL, Runtime
from thinwire.core.comm.work import Meter, Work, completed, describe
from thinwire.core.kernels.decisions import read_host, to_device
from thinwire.core.storage.bucket import Traffic
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError, PeerLostError, ThinwireError

T = TypeVar("T")
_NAME_BYTES = 24
_WORDS = struct.Struct("!3q")  # the name of a call, as integers
_COMPARED = 5  # integers of a check: the step, the words and the number
RULE = "all ranks must make the same calls after the same steps"
CHECK_BYTES = 8 * 7
"""The integers that each rank sends to every other one in `Comm.check_in_step`."""
DIRECT_GATHER_BYTES = 4096
"""Vectors up to this size are all-gathered by direct messages, longer ones around a ring."""


class Reporter(Protocol):
    """Reports two integers of this rank with each check, and uses those of all ranks."""

    def row(self, sends: tuple[float, int, int]) -> tuple[int, int]:
        """Return this rank's integers, with what `slowest_send` has returned."""
        ...

    def take(self, rows: Sequence[Sequence[int]]) -> None:
        """Use the integers of all ranks, in rank order."""
        ...


class Comm(ABC):
    """One rank's view of the group of ranks that train together.

    All ranks must make the same calls in the same order; for `send_recv` each `dst` needs a matching `src`.

    Attributes:
        rank: this worker's rank, from 0.
        size: the number of workers.
        step: the training step, for error messages; set by `Worker`.
        timeout: how long one wait may last, in seconds.
        meter: bytes sent and seconds waited so far.
        in_step: whether all ranks make the same calls at the same step, so that messages of different steps are errors;
            False for strategies whose workers run at their own pace.
        rule: the rule that ranks out of step have broken, for error messages.
        round: the name of the round that the next collective call belongs to; the call is launched with a check that
            all ranks are present. Empty for no check.
        checks_calls: whether every collective call first checks that all ranks make the same call with tensors of one
            size and dtype; for debugging.
        calling: the check that is being launched, for error messages.
        silent: ranks that have just joined and do not contribute to means of parameters yet.
        check_device: the device of the tensors that checks send.
        reporter: adds two integers of each rank to every check; None sends zeros.
        runtime: the clock, the locks and the threads; a simulation provides its own.
        request_seconds: how long one message takes at least, over a store that answers requests; 0 over connections.
        traffic: the requests to that store so far; None over connections.
        checks_first_steps: whether workers compare their initial parameters and their data in the first steps; False in
            simulations, where these messages would take virtual time.

    Example:
        >>> import torch
        >>> from thinwire import Comm, run_threads
        >>> def work(comm: Comm) -> list[float]:
        ...     return comm.all_reduce_(torch.tensor([1.0, float(comm.rank)])).wait().tolist()
        >>> run_threads(3, work)
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """

    checks_first_steps: ClassVar[bool] = True

    def __init__(self, rank: int, size: int, *, timeout: float = 60.0) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank}: must lie in 0..{size - 1} for {size} workers")
        if timeout <= 0:
            raise ConfigError(f"timeout={timeout}: must be positive. 60 is usual")
        self.rank = rank
        self.size = size
        self.step = 0
        self.timeout = timeout
        self.meter = Meter()
        self.in_step = True
        self.rule = RULE
        self.round = ""
        self.checks_calls = False
        self.calling = ""
        self.silent: frozenset[int] = frozenset()
        self.check_device = torch.device("cpu")
        self.reporter: Reporter | None = None
        self.runtime: Runtime = REAL
        self.request_seconds = 0.0
        self.traffic: Traffic | None = None
        # Weak, so that a mailbox ends with its owner without being closed.
        self._mailboxes: WeakKeyDictionary[object, Mailbox] = WeakKeyDictionary()
        self._mailbox_count = 0

    def all_reduce_(self, x: Tensor, *, op: Literal["sum", "min"] = "sum") -> Work[Tensor]:
        """Replace `x` on every rank by the sum, or the elementwise minimum, over all ranks.

        Args:
            x: a vector; equal in size and dtype on all ranks.
            op: "sum"; or "min", for a few integers: its payload counts as one message of the size of `x`.
        """
        if self.size == 1:
            return completed(x)
        if op == "min":
            return self._track("all_reduce_min", x.nbytes, lambda: self._all_reduce_min_(x), x)
        sent = 2 * (self.size - 1) * x.nbytes / self.size
        return self._track("all_reduce", sent, lambda: self._all_reduce_(x), x)

    def broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        """Replace `x` on every rank with that of rank `src`."""
        if self.size == 1:
            return completed(x)
        sent = (self.size - 1) * x.nbytes / self.size
        return self._track("broadcast", sent, lambda: self._broadcast_(x, src), x)

    def all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        """Gather every rank's `x`, in the order of ranks; all have the same shape and dtype."""
        if self.size == 1:
            return completed([x])
        return self._track("all_gather", (self.size - 1) * x.nbytes, lambda: self._all_gather(x), x)

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        """Send `xs[j]` to rank j and receive one vector from each rank.

        Args:
            xs: one vector per rank, of any sizes and one dtype.
            sizes: the number of elements to receive from each rank.

        Raises:
            ConfigError: the lists do not have one entry for each rank.
        """
        if len(xs) != self.size or len(sizes) != self.size:
            raise ConfigError(
                f"all_to_all got {len(xs)} vectors and {len(sizes)} sizes: it needs one of each for each of "
                f"{self.size} ranks"
            )
        if self.size == 1:
            return completed([xs[0]])
        sent = sum(x.nbytes for j, x in enumerate(xs) if j != self.rank)
        return self._track("all_to_all", sent, lambda: self._all_to_all(xs, sizes))

    def send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        """Send `x` to each rank in `dst`; receive one vector like `x` from each rank in `src`, in that order.

        Args:
            x: of any shape and dtype, the same on all ranks involved.
            dst: the ranks to send to.
            src: the ranks to receive from.

        Raises:
            ConfigError: this rank is in `dst` or `src`.
        """
        if self.rank in dst or self.rank in src:
            raise ConfigError(f"rank {self.rank} sends to itself in send_recv: a topology must not contain self-loops")
        if not dst and not src:
            return completed([])
        return self._track("send_recv", len(dst) * x.nbytes, lambda: self._send_recv(x, dst, src))

    def check_in_step(self, call: str, *, fingerprint: int = 0) -> Work[list[int]]:
        """Check that all ranks make this call at the same step; each sends 56 bytes.

        Checks with different names match each other, so that all ranks detect a rank that makes another call, and its
        messages are not mistaken for something else. The bytes are counted in `meter.check_bytes`.

        Args:
            call: a name of up to 24 bytes.
            fingerprint: a 63-bit hash of data that should be equal on all ranks, such as the parameters.

        Returns:
            A handle. Its `wait` raises MismatchError on all ranks, with the ranks, their calls and steps; or it returns
            the ranks whose fingerprint differs from the majority's, the same list on all ranks.

        Example:
            >>> from thinwire import Comm, MismatchError, run_threads
            >>> def work(comm: Comm) -> None:
            ...     comm.check_in_step("save()" if comm.rank == 2 else "consensus()").wait()
            >>> try:
            ...     run_threads(3, work)
            ... except MismatchError as error:
            ...     print(str(error).partition(";")[0])
            ranks are out of step: ranks 0, 1 are in consensus() at step 0, rank 2 is in save() at step 0
        """
        return self.gather_in_step(call, fingerprint).then(_odd_ones)

    def gather_in_step(self, call: str, number: int) -> Work[list[int]]:
        """Check that all ranks make this call at the same step, and gather a number from each.

        Args:
            call: a name of up to 24 bytes.
            number: an integer of up to 63 bits.

        Returns:
            A handle for the numbers in rank order; its `wait` may raise MismatchError on all ranks.
        """
        if self.size == 1:
            self.round = ""
            return completed([number])
        gathered, clock = self._gather_row(call, number), self.runtime.clock
        return self.meter.timed(gathered, "check", clock(), clock, self.step)

    def _gather_row(self, call: str, number: int) -> Work[list[int]]:
        self.round = ""  # also after a hook that failed before its first call
        words = _WORDS.unpack(call.encode()[:_NAME_BYTES].ljust(_NAME_BYTES))
        report = self.reporter.row(self.slowest_send()) if self.reporter else (0, 0)
        row = torch.tensor(
            [self.step if self.in_step else -1, *words, number, *report], dtype=torch.int64, device="cpu"
        )
        self.meter.check_bytes += (self.size - 1) * CHECK_BYTES
        self.calling = call
        try:
            if self.check_device != row.device:
                row = to_device(row, self.check_device)
            return self._all_gather_rows(row).then(self._compare)
        finally:
            self.calling = ""

    def _compare(self, gathered: Tensor) -> list[int]:
        """Return the number of each row; raise if what comes before it differs."""
        if gathered.device.type != "cpu":
            gathered = read_host(gathered)
        if self.reporter is not None:
            self.reporter.take(gathered[:, _COMPARED:].tolist())
        together = gathered[:, :_COMPARED]
        if bool((together == together[0]).all()):
            return [int(together[0, -1])] * self.size
        entries = [tuple(row) for row in together.tolist()]
        if len({entry[:-1] for entry in entries}) > 1:
            found = "ranks are out of step: " + places([_place(entry) for entry in entries], self.names)
            self.raise_on_all(MismatchError(f"{found}; {self.rule}"))
        return [entry[-1] for entry in entries]

    def slowest_send(self) -> tuple[float, int, int]:
        """Return how long this rank's busiest connection was busy since the last call, in seconds.

        Hashes of the addresses of this rank and of its peer follow. All are 0 where that is not known.
        """
        return 0.0, 0, 0

    def awaited(self) -> list[int]:
        """Return the ranks whose messages this rank has awaited for a second or more; any thread may ask.

        Empty where this is not known.
        """
        return []

    def count_other_calls(self) -> int:
        """Count the calls of `torch.distributed` process groups with two or more of these ranks.

        The count may include this comm's own calls. It is 0 if ranks are not processes of `torch.distributed`.
        """
        return 0

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error that only this rank has detected, on all ranks.

        The error's text should name this rank and the step. On each other rank the current or the next wait raises an
        error of the same class with the same text. If several ranks call this at the same time, all raise the error of
        the first. The comm cannot be used afterwards. On NCCL, calls of other ranks end with NCCL's own timeout.

        Args:
            error: an error of thinwire, such as a NonFiniteError.

        Raises:
            ThinwireError: the error, or one that another rank has reported earlier.

        Example:
            >>> import torch
            >>> from thinwire import Comm, NonFiniteError, run_threads
            >>> def work(comm: Comm) -> None:
            ...     if comm.rank == 1:
            ...         comm.raise_on_all(NonFiniteError("rank 1, step 0: the loss is nan"))
            ...     try:
            ...         comm.all_reduce_(torch.ones(2)).wait()
            ...     except NonFiniteError as error:
            ...         print(error)
            >>> try:
            ...     run_threads(2, work)
            ... except NonFiniteError:
            ...     pass
            rank 1, step 0: the loss is nan
        """
        raise error

    def name(self, rank: int) -> str:
        """Return a rank for an error message, with its rank in the job if that differs."""
        return f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """Return ranks for an error message."""
        each = [self.name(rank) for rank in ranks]
        return named(ranks) if each == [f"rank {rank}" for rank in ranks] else ", ".join(each)

    def failure(self, call: str, problem: str, *, late: bool, closed: bool = False) -> ThinwireError:
        """Make the error for a wait that failed because of other ranks.

        Args:
            call: the call that was waited for.
            problem: the problem as this rank knows it.
            late: whether the timeout has passed; otherwise a rank is gone.
            closed: whether that rank announced its end, which does not imply a failure.
        """
        if late:
            return CommTimeoutError(f"{self.name(self.rank)} waited {self.timeout:g} s for {call} at step {self.step}")
        return PeerLostError(f"{self.name(self.rank)}, step {self.step}, {call}: {problem}")

    @property
    def ranks_key(self) -> object:
        """Return an object that is the same for all comms of this rank over the same ranks."""
        return self

    @property
    def wires_key(self) -> object:
        """Return an object that is the same for comms that share connections, and so need one order of calls."""
        return self

    def has_failed(self) -> bool:
        """Return True if an earlier failure is known to have closed this comm."""
        return False

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended."""
        return False

    def disconnect(self) -> None:
        """Close this comm's own connections and mailboxes; later calls raise an error."""

    def open_mailbox(self, owner: object, like: Tensor, *, capacity: int = 4) -> Mailbox:
        """Open a mailbox for `owner`, on all ranks together; its messages are counted as `send_recv`.

        Args:
            owner: the object that the mailbox belongs to, such as a replica; its previous mailbox is closed.
            like: a vector as long as the longest message, on the device of all messages.
            capacity: unconsumed messages allowed from one rank to another; further sends wait.

        Raises:
            ConfigError: this backend has no mailboxes, or a required library is missing.
        """
        self.close_mailbox(owner)
        # Ranks open mailboxes in one order, so the count names the same mailbox on all of them.
        self._mailbox_count += 1
        box = self._mailboxes[owner] = self._open_mailbox(self._mailbox_count, like, capacity)
        return box

    def mailbox(self, owner: object) -> Mailbox:
        """Return the mailbox that was opened for `owner`.

        Raises:
            ConfigError: no mailbox is open.
        """
        if owner not in self._mailboxes:
            raise ConfigError(
                f"rank {self.rank}: no mailbox is open for {owner!r}. Call open_mailbox(...) on all ranks first"
            )
        box = self._mailboxes[owner]
        box.follow_stream()
        return box

    def close_mailbox(self, owner: object) -> None:
        """Close the mailbox of `owner`, if it has one; later messages to it are lost."""
        if owner in self._mailboxes:
            self._mailboxes.pop(owner).close()

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        raise ConfigError(f"{type(self).__name__} has no mailboxes. Use a process group, threads or a counter")

    def _attach_check(self, call: str) -> bool:
        """Let the next collective call carry the check; return False if this backend needs a message for it."""
        return False

    def _check_call(self, operation: str, like: Tensor | None) -> Work[list[int]]:
        """Check that all ranks make this call with equal sizes and dtypes: Gloo would abort or give wrong sums."""
        if self._attach_check(self.round or operation):
            self.round = ""
            return completed(list[int]())
        call = operation if like is None else f"{operation} of {describe(like)}"
        number = int.from_bytes(blake2b(call.encode(), digest_size=8).digest(), "big") >> 1

        def refuse(odd: list[int]) -> list[int]:
            if odd:
                which = f"{self.names(odd)} {'makes' if len(odd) == 1 else 'make'}"
                self.raise_on_all(
                    MismatchError(
                        f"ranks make different calls at step {self.step}: {which} another collective, or one of "
                        f"another size or dtype, than the others; {self.name(self.rank)} makes {call}. All ranks "
                        "must make the same calls with tensors of one size and dtype"
                    )
                )
            return odd

        check = self._gather_row(self.round or operation, number).then(_odd_ones).then(refuse)
        if self.checks_calls:
            check.wait()
        return check

    def _track(self, operation: str, sent: float, launch: Callable[[], Work[T]], like: Tensor | None = None) -> Work[T]:
        """Count a call, launch it, and time its wait; `like` has the same size and dtype on all ranks."""
        check = None
        if (self.round or self.checks_calls) and operation != "send_recv":
            check = self._check_call(operation, like)
        clock = self.runtime.clock
        launched = clock()
        work = launch()
        self.meter.sent(operation, sent)
        # The step of the launch: the wait may belong to a later step.
        return self.meter.timed(work if check is None else work.after(check), operation, launched, clock, self.step)

    # -- for backends, which need no checks, no counting and no special case for one rank
    # ------------------------------------------

    @abstractmethod
    def _all_reduce_(self, x: Tensor) -> Work[Tensor]: ...

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        return self._all_gather(x).then(lambda rows: x.copy_(torch.stack(list(rows)).amin(0)))

    @abstractmethod
    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]: ...

    def _all_gather_rows(self, x: Tensor) -> Work[Tensor]:
        """Gather every rank's vector as a row of one tensor, which the caller only reads."""
        return self._all_gather(x).then(lambda rows: torch.stack(list(rows)))

    @abstractmethod
    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]: ...

    @abstractmethod
    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]: ...


def _odd_ones(numbers: Sequence[int]) -> list[int]:
    """Return the ranks whose number differs from the majority's."""
    if numbers.count(numbers[0]) == len(numbers):
        return []
    most = Counter(numbers).most_common(1)[0][0]
    return [rank for rank, number in enumerate(numbers) if number != most]


def named(ranks: Sequence[int]) -> str:
    """Return ranks for an error message."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def places(calls: Sequence[str], names: Callable[[Sequence[int]], str] = named) -> str:
    """Describe the call of each rank in rank order; ranks with the same call are grouped."""
    groups: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(call, []).append(rank)
    return ", ".join(f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'} in {call}" for call, ranks in groups.items())


def _place(entry: Sequence[int]) -> str:
    """Return the call and the step of a compared row as text."""
    call = _WORDS.pack(*entry[1:-1]).decode(errors="replace").rstrip()
    return f"{call} at step {entry[0]}" if entry[0] >= 0 else call

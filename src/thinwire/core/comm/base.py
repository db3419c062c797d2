# SPDX-License-Identifier: Apache-2.0
"""The communication calls that every backend offers.

Every call returns a `Work`; its `wait()` returns the result. A tensor that was passed to a call must not be read or
written before that wait. Bytes are counted here, once, from the tensors themselves, so that all backends (process
group, threads, counter) give the same figures.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import ClassVar, Literal, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.runtime import REAL, Runtime
from thinwire.core.comm.work import Meter, Work, completed, describe, nbytes_of
from thinwire.errors import CommTimeoutError, ConfigError, MismatchError, PeerLostError, ThinwireError

T = TypeVar("T")
_NAME_BYTES = 24
_WORDS = struct.Struct("!3q")  # the name of a call, as integers
RULE = "all ranks must make the same calls after the same steps"
CHECK_BYTES = 8 * 5
"""What each rank sends to every other one in `Comm.check_in_step`: five integers."""
DIRECT_GATHER_BYTES = 4096
"""A vector of no more bytes is all-gathered by a message to each other rank, and a longer one around a ring."""


class Comm(ABC):
    """One rank's view of the group of ranks that train together.

    All ranks must make the same calls in the same order; for `send_recv` each `dst` needs a matching `src`.

    Attributes:
        rank: this worker's rank, from 0.
        size: the number of workers.
        step: the training step that errors name; set by `Worker`.
        timeout: how long one wait may last, in seconds.
        meter: bytes sent and seconds waited so far.
        in_step: whether all ranks make the same calls at the same step, so that messages of different steps are errors;
            False for strategies whose workers go at their own pace.
        rule: what ranks that are out of step should do, for errors.
        round: what the next collective call belongs to; it is launched with a check that all ranks are there. Empty
            for no check.
        checks_calls: whether every collective call waits for a check that all ranks make the same one, with tensors of
            one size and dtype; for debugging.
        calling: the check that is being launched, for errors.
        silent: ranks that have just joined, and add nothing to means of parameters yet.
        check_device: where the checks' few bytes lie.
        runtime: the clock that waits are measured by, the locks and the threads; a simulation brings its own.
        checks_first_steps: whether workers compare their start and their data in the first steps; False in simulations,
            where the messages would take virtual time.

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
            raise ConfigError(f"timeout={timeout}: must be positive; 60 is usual")
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
        self.runtime: Runtime = REAL
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
            return self._track("all_reduce_min", nbytes_of(x), lambda: self._all_reduce_min_(x), x)
        sent = 2 * (self.size - 1) * nbytes_of(x) / self.size
        return self._track("all_reduce", sent, lambda: self._all_reduce_(x), x)

    def broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        """Replace `x` on every rank by that of rank `src`."""
        if self.size == 1:
            return completed(x)
        sent = (self.size - 1) * nbytes_of(x) / self.size
        return self._track("broadcast", sent, lambda: self._broadcast_(x, src), x)

    def all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        """Gather every rank's `x`, in the order of ranks; all have the same shape and dtype."""
        if self.size == 1:
            return completed([x])
        return self._track("all_gather", (self.size - 1) * nbytes_of(x), lambda: self._all_gather(x), x)

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        """Send `xs[j]` to rank j and receive one vector from each rank.

        Args:
            xs: one vector per rank, of any sizes and one dtype.
            sizes: the number of elements to receive from each rank.

        Raises:
            ConfigError: not one vector and one size per rank.
        """
        if len(xs) != self.size or len(sizes) != self.size:
            raise ConfigError(
                f"all_to_all of {len(xs)} vectors and {len(sizes)} sizes: {self.size} ranks need one each"
            )
        if self.size == 1:
            return completed([xs[0]])
        sent = sum(nbytes_of(x) for j, x in enumerate(xs) if j != self.rank)
        return self._track("all_to_all", sent, lambda: self._all_to_all(xs, sizes))

    def send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        """Send `x` to each rank in `dst`; receive one vector like `x` from each rank in `src`, in that order.

        Args:
            x: of any shape and dtype, the same on all ranks that it goes to or comes from.
            dst: ranks.
            src: ranks.

        Raises:
            ConfigError: this rank is among them.
        """
        if self.rank in dst or self.rank in src:
            raise ConfigError(f"send_recv of rank {self.rank} with itself: a topology must not contain self-loops")
        if not dst and not src:
            return completed([])
        return self._track("send_recv", len(dst) * nbytes_of(x), lambda: self._send_recv(x, dst, src))

    def check_in_step(self, call: str, *, fingerprint: int = 0) -> Work[list[int]]:
        """Check that all ranks make this call, at the same step; they send 40 bytes each.

        Calls of different names meet each other, so that a rank which is in another one is found by all ranks at once,
        and nothing that it sends is taken for something else. The bytes are counted as `meter.check_bytes`.

        Args:
            call: a name of up to 24 bytes.
            fingerprint: a number of 63 bits of what is to be equal on all ranks, such as the parameters.

        Returns:
            A handle whose `wait` raises MismatchError on all ranks, with the ranks, their calls and steps; or returns
            the ranks whose fingerprint is not that of most, the same list on all ranks.

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
        """Check that all ranks make this call at the same step, as `check_in_step`, and gather a number of each rank.

        Args:
            call: a name of up to 24 bytes.
            number: of 63 bits.

        Returns:
            A handle of the numbers in the order of ranks; its `wait` may raise MismatchError on all ranks.
        """
        self.round = ""  # also where a hook has failed before its first call
        if self.size == 1:
            return completed([number])
        words = _WORDS.unpack(call.encode()[:_NAME_BYTES].ljust(_NAME_BYTES))
        row = torch.tensor(
            [self.step if self.in_step else -1, *words, number], dtype=torch.int64, device=self.check_device
        )
        self.meter.check_bytes += (self.size - 1) * CHECK_BYTES
        self.calling = call
        try:
            return self._all_gather(row).then(self._compare)
        finally:
            self.calling = ""

    def _compare(self, rows: Sequence[Tensor]) -> list[int]:
        """The last number of each row, where all others are equal."""
        together = torch.stack(list(rows))
        if bool((together == together[0]).all()):
            return [int(together[0, -1])] * self.size
        entries = [tuple(row) for row in together.tolist()]
        if len({entry[:-1] for entry in entries}) > 1:
            found = "ranks are out of step: " + places([_place(entry) for entry in entries], self.names)
            self.raise_on_all(MismatchError(f"{found}; {self.rule}"))
        return [entry[-1] for entry in entries]

    def count_other_calls(self) -> int:
        """Count the calls so far of `torch.distributed` process groups in which two of these ranks or more meet.

        This comm's own calls may be among them. 0 where ranks are no processes of `torch.distributed`.
        """
        return 0

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error that this rank has found by itself; calls of all other ranks raise it too.

        The error's text should name this rank and the step. The other ranks' next wait, or the one that they are in,
        raises an error of the same class, one of thinwire's, and text. If several ranks call this at the same
        time, all raise the error of the first. The comm cannot be used afterwards. On NCCL the others' calls end with
        its own timeout.

        Args:
            error: such as a NonFiniteError.

        Raises:
            ThinwireError: the error; or what another rank has reported before.

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
        """A rank, for an error: also by its number in the whole job, where these ranks are a part of it."""
        return f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks, for an error."""
        each = [self.name(rank) for rank in ranks]
        return named(ranks) if each == [f"rank {rank}" for rank in ranks] else ", ".join(each)

    def failure(self, call: str, problem: str, *, late: bool, closed: bool = False) -> ThinwireError:
        """The error of a wait that other ranks have let fail; made by backends and mailboxes.

        Args:
            call: what was waited for.
            problem: what is known of it here.
            late: whether the timeout has passed; otherwise a rank is gone.
            closed: whether that rank has said that it ends, which no failure needs to have caused.
        """
        if late:
            return CommTimeoutError(f"{self.name(self.rank)} waited {self.timeout:g} s for {call} at step {self.step}")
        return PeerLostError(f"{self.name(self.rank)}, step {self.step}, {call}: {problem}")

    @property
    def ranks_key(self) -> object:
        """Identifies the ranks: the same object for comms of one rank that have the same ranks."""
        return self

    @property
    def wires_key(self) -> object:
        """Identifies the connections: calls on comms that share them need one order on all ranks."""
        return self

    def has_failed(self) -> bool:
        """Whether an earlier failure has closed this comm, as far as is known."""
        return False

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended; False where nothing is known."""
        return False

    def disconnect(self) -> None:
        """Close this comm's own connections and mailboxes, and those of its duplicates; later calls raise an error."""

    def duplicate(self) -> Comm:
        """A second comm over the same ranks, with connections of its own, for CPU tensors; all ranks call it together.

        A background thread may use it while the training thread uses this one: the calls of either need one order on
        all ranks, but no order between the two.

        Raises:
            ConfigError: this backend cannot open further connections.
        """
        raise ConfigError(
            f"{type(self).__name__} has no connections to spare for a thread beside the one that trains; Gloo has: "
            "start the group with init_process_group('gloo') or 'cpu:gloo,cuda:nccl'"
        )

    def open_mailbox(self, owner: object, like: Tensor, *, capacity: int = 4) -> Mailbox:
        """Open a mailbox for `owner`, on all ranks together; its messages count as `send_recv`.

        Args:
            owner: the object that the mailbox belongs to, such as a replica; its previous mailbox is closed.
            like: a vector as long as the longest message, on the device of all messages.
            capacity: unconsumed messages allowed from one rank to another; a sender of one more waits.

        Raises:
            ConfigError: this backend has no mailboxes, or a library that they need is missing.
        """
        self.close_mailbox(owner)
        # Ranks open mailboxes in one order, so the count names the same mailbox on all of them.
        self._mailbox_count += 1
        box = self._mailboxes[owner] = self._open_mailbox(self._mailbox_count, like, capacity)
        return box

    def mailbox(self, owner: object) -> Mailbox:
        """The mailbox that was opened for `owner`.

        Raises:
            ConfigError: there is none, or it was closed.
        """
        if owner not in self._mailboxes:
            raise ConfigError(f"rank {self.rank}: no mailbox is open for {owner!r}; open_mailbox(...) on all ranks")
        box = self._mailboxes[owner]
        box.follow_stream()
        return box

    def close_mailbox(self, owner: object) -> None:
        """Close the mailbox of `owner`, if it has one; later messages to it are lost."""
        if owner in self._mailboxes:
            self._mailboxes.pop(owner).close()

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        raise ConfigError(f"{type(self).__name__} has no mailboxes; use a process group, threads or a counter")

    def _check_call(self, operation: str, like: Tensor | None) -> Work[list[int]]:
        """Check that all ranks make this call, with tensors alike: Gloo would end a process, or give wrong sums."""
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

        check = self.check_in_step(self.round or operation, fingerprint=number).then(refuse)
        if self.checks_calls:
            check.wait()
        return check

    def _track(self, operation: str, sent: float, launch: Callable[[], Work[T]], like: Tensor | None = None) -> Work[T]:
        """Count the call, launch it, and time the wait for it; `like` is what all ranks have of one size and dtype."""
        self.meter.sent(operation, sent)
        check = None
        if (self.round or self.checks_calls) and operation != "send_recv":
            check = self._check_call(operation, like)
        # The step of the launch: the wait may belong to a later step.
        clock, step = self.runtime.clock, self.step
        launched = clock()
        work = launch()

        def finish() -> T:
            start = clock()
            if check is not None:
                check.wait()
            result = work.wait()
            self.meter.waited(operation, launched, start, clock(), step)
            return result

        return Work(finish)

    # -- for backends: without checks, counting or the case of one rank ------------------------------------------

    @abstractmethod
    def _all_reduce_(self, x: Tensor) -> Work[Tensor]: ...

    @abstractmethod
    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]: ...

    @abstractmethod
    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]: ...

    @abstractmethod
    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]: ...

    @abstractmethod
    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]: ...


def _odd_ones(numbers: Sequence[int]) -> list[int]:
    """The ranks whose number is not that of most."""
    most = Counter(numbers).most_common(1)[0][0]
    return [rank for rank, number in enumerate(numbers) if number != most]


def named(ranks: Sequence[int]) -> str:
    """Ranks, for an error."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def places(calls: Sequence[str], names: Callable[[Sequence[int]], str] = named) -> str:
    """What the ranks do, in the order of ranks; those that do the same are named together."""
    groups: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(call, []).append(rank)
    return ", ".join(f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'} in {call}" for call, ranks in groups.items())


def _place(entry: Sequence[int]) -> str:
    """The call and the step of a row that ranks have compared."""
    call = _WORDS.pack(*entry[1:-1]).decode(errors="replace").rstrip()
    return f"{call} at step {entry[0]}" if entry[0] >= 0 else call

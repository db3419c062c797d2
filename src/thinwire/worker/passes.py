# SPDX-License-Identifier: Apache-2.0
"""The end of the outermost backward pass, for all workers of one model.

A backward pass may run others within it: reentrant checkpoints, tiled layers, tensor hooks. The autograd engine calls
what is queued in an inner pass at the end of that one. The gradients are complete at the end of the outermost pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch

from thinwire.comm.base import Comm
from thinwire.errors import ConfigError
from thinwire.torch_internals import current_autograd_node, queue_callback

_STEADY_PASSES = 4


class PassEnd:
    """The callback at the end of the outermost backward pass.

    The autograd engine holds the only reference. A pass that an exception has ended drops it, and members of the pass
    find that out by their weak references.

    Attributes:
        node_frame: the Python frame that runs an inner pass, from the end of that inner pass until the node of the
            outer pass that called it has ended; None otherwise.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self.node_frame: FrameType | None = None

    def queue(self) -> None:
        """Have the engine call this at the end of the pass that is running."""
        queue_callback(self)

    def __call__(self) -> None:
        """End the pass, or continue in the pass that this one runs within."""
        node = _running_node()
        if node is None:
            self._finish()
            return
        # The end of an inner pass. Of the outer one this thread can only reach the node that called the inner pass.
        self.node_frame = _node_frame()

        def continue_outside(*_: object) -> None:
            handle.remove()
            # A pass that has failed in this node may leave the hook behind, on a graph that the loop still holds.
            if self.node_frame is not None:
                self.node_frame = None
                self.queue()

        handle = node.register_hook(continue_outside)

    def is_abandoned(self) -> bool:
        """Whether the outer pass failed before the node that called the inner one had ended."""
        return self.node_frame is not None and not _on_stack(self.node_frame)

    def forget(self) -> None:
        """Never call `finish`."""
        self.node_frame = None


def _running_node() -> Any:
    """The node of the outer pass that has called the pass that ends now; None at the end of an outermost pass."""
    if current_autograd_node is not None:
        return current_autograd_node()
    if _count_engines() > 1:
        raise ConfigError(
            "a backward pass within a backward pass: this version of torch does not report the outer one. Use "
            "checkpoint(..., use_reentrant=False), or another version of torch"
        )
    return None


def _runs_engine(frame: FrameType) -> bool:
    return "run_backward" in frame.f_code.co_names


def _count_engines() -> int:
    """How many calls of the autograd engine this thread is in."""
    frame, count = inspect.currentframe(), 0
    while frame is not None:
        count += _runs_engine(frame)
        frame = frame.f_back
    return count


def _node_frame() -> FrameType | None:
    """The outermost frame of the node that has called the pass that ends now."""
    frame, last, engines = inspect.currentframe(), None, 0
    while frame is not None:
        engines += _runs_engine(frame)
        if engines == 2:
            return last
        frame, last = frame.f_back, frame
    return last  # GPUs have a thread of their own for their nodes


def _on_stack(wanted: FrameType) -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


class Member(Protocol):
    """The gradients of one worker; see `thinwire.worker.buckets.Backward`."""

    @property
    def comm(self) -> Comm:
        """The ranks that the gradients travel between."""
        ...

    @property
    def in_pass(self) -> bool:
        """Whether a pass has used the worker's parameters, and has not been flushed yet."""
        ...

    def launch_early(self) -> None:
        """Send all buckets but the last, also without a pass."""
        ...

    def flush_own(self) -> None:
        """Send the remaining buckets and wait for all of them."""
        ...

    def end_failed(self, *, stepped: bool = False) -> None:
        """Where the last pass has failed, end it with the other ranks."""
        ...

    def failed_state(self, *, stepped: bool) -> int:
        """What this rank reports of a failed pass."""
        ...

    def finish_failed(self, state: int) -> None:
        """`end_failed`, for the parameters of this worker."""
        ...


class Passes:
    """Ends backward passes for all workers of one model, in the order in which these were attached.

    The optimizers of one model may have a worker each. Ranks can use their parameters in different orders, or leave the
    parameters of one worker out. All ranks must exchange the gradients of the same workers in the same order, so with
    several workers each pass ends with a message of a few bytes.

    Attributes:
        members: the workers' gradients, in the order of attach.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._always: list[Member] = []
        self._count = 0
        self._end: ref[PassEnd] | None = None

    def add(self, member: Member) -> None:
        """Take in the worker that was attached last."""
        self._set([*self.members, member])

    def leave(self, member: Member) -> None:
        """Forget a worker that is detached, or gets another strategy."""
        self._set([each for each in self.members if each is not member])

    def _set(self, members: list[Member]) -> None:
        self.members, self._always, self._count = members, list(members), 0

    def sends_early(self, member: Member) -> bool:
        """Whether a member may send before the end of the pass, as on all ranks."""
        first = self.members[0]
        if len(self.members) == 1:
            return True
        # A rank that does not use the member must send what the others have sent before it learns of that.
        if self._count < _STEADY_PASSES or not any(member is each for each in self._always):
            return False
        # Messages that share connections with those of other workers have one order on all ranks.
        return member is first or member.comm.wires_key is not first.comm.wires_key

    def enter(self) -> ref[PassEnd]:
        """The end of the pass that is running; the first member that has a gradient queues it."""
        end = None if self._end is None else self._end()
        if end is None or end.is_abandoned():
            end = PassEnd(self.flush)
            self._end = ref(end)
            end.queue()
        assert self._end is not None
        return self._end

    def flush(self) -> None:
        """End the pass of all members that any rank has used; or, without a pass, take part in that of the others."""
        for member in list(self.members):
            member.end_failed()
        self._finish(lambda member: member.flush_own())

    def end_failed(self, stepping: Member, *, stepped: bool) -> None:
        """End a pass that an exception has stopped on this rank, with the other ranks; see `Backward.end_failed`."""
        states = {id(member): member.failed_state(stepped=stepped and member is stepping) for member in self.members}
        self._finish(lambda member: member.finish_failed(states[id(member)]))

    def _finish(self, finish: Callable[[Member], None]) -> None:
        if (end := None if self._end is None else self._end()) is not None:
            end.forget()
        self._end = None
        used = self.members if len(self.members) == 1 else self._agree()
        for member in list(used):
            finish(member)

    def _agree(self) -> list[Member]:
        """The members that any rank has used in this pass, and those that have sent already."""
        sent = [member for member in self.members if self.sends_early(member)]
        for member in sent:
            member.launch_early()
        first = self.members[0]
        used = torch.tensor([int(member.in_pass) for member in self.members], dtype=torch.int32, device="cpu")
        both = torch.cat([used, -used]).to(first.comm.check_device)
        # The least of `used`, 1 where all ranks use a member, and the least of its negative, 0 where none does.
        on_all, unused = first.comm.all_reduce_(both, op="min").wait().view(2, -1).tolist()
        found = list(zip(self.members, on_all, unused, strict=True))
        self._count += 1
        kept = {id(member) for member in self._always}
        self._always = [member for member, all_use, _ in found if all_use and id(member) in kept]
        sent_already = {id(member) for member in sent}
        # What no rank has used is left alone, unless it was sent already: then a missing gradient counts as zero.
        return [member for member, _, least in found if least or id(member) in sent_already]

# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: gathered and sent as soon as their gradients are final, during the backward pass.

The flat vector follows the order of the model's parameters. Gradients become final in roughly the opposite order, so
buckets are cut and sent from the end of the vector. Every rank sends them in the same order, whatever the order in
which its gradients become final; otherwise messages of different buckets would be matched with each other.

A backward pass may run others within it: reentrant checkpoints, tiled layers, tensor hooks. The autograd engine calls
callbacks queued in an inner pass at the end of that pass. The gradients are complete at the end of the outermost pass.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Work
from thinwire.core.kernels import all_finite, all_finite_each, finite_flags
from thinwire.core.kernels.decisions import host_copy
from thinwire.core.replica.flat import Segment, copy_each_, views
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.shards import is_sharded, local, plain, whole_like
from thinwire.core.torch_internals import current_autograd_node, queue_callback
from thinwire.errors import CommError, CommTimeoutError, ConfigError, MismatchError, NonFiniteError, PeerLostError
from thinwire.methods.codecs.feedback import of_server, of_worker
from thinwire.tensor2d.gradient import BlockGradient

_FIRST_BYTES = 1 << 20
_STEADY_PASSES = 4
_LOGGER = logging.getLogger("thinwire")
Exchange = Callable[[Replica, slice], Work[Tensor] | None]


@dataclass
class Bucket:
    """Consecutive parameters of one replica whose gradients travel together.

    Attributes:
        replica: whose flat gradient the bucket is a part of.
        parameters: in the order of the vector.
        gradients: views of `replica.g`, one for each parameter.
        part: where the bucket lies in `replica.g`.
        expected: how often its parameters accumulate gradient in a pass, all together; the most that a pass has had.
        missing: how many of these are still to come in this pass; negative where there were more.
        work: the exchange, while it is in flight.
        culprit: a parameter whose gradient was not finite before it was sent, by its place in the bucket; -1 for none.
        finite: on a GPU instead, where the exchange writes over gradients: whether each of them was finite.
        kept: a copy of gradients that lie in the memory that is sent; in host memory for a GPU.
        sharded: whether any of the parameters is a DTensor.
    """

    replica: Replica
    parameters: list[Tensor]
    gradients: list[Tensor]
    part: slice
    expected: int = 0
    missing: int = 0
    work: Work[Tensor] | None = None
    culprit: int = -1
    finite: Tensor | None = None
    kept: Tensor | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        """Expect one gradient for each parameter, until a pass has had more."""
        self.expected = len(self.parameters)
        self.sharded = any(is_sharded(parameter) for parameter in self.parameters)

    def gather(self, *, keep: bool = False) -> None:
        """Copy the parameters' gradients into the flat vector; a missing gradient counts as zero.

        Args:
            keep: whether gradients that lie in that memory must be there to be sent again.
        """
        self.culprit, self.finite = -1, None
        with torch.no_grad():
            found: list[tuple[Tensor, Tensor]] = []
            for gradient, parameter in zip(self.gradients, self.parameters, strict=True):
                if parameter.grad is None:
                    gradient.zero_()
                elif gradient.numel():  # without elements it lies nowhere
                    grad = parameter.grad
                    plainly = type(grad) is Tensor and grad.layout is torch.strided
                    found.append((gradient, grad if plainly else local(grad).to_dense()))
            # After `zero_grad(set_to_none=False)` gradients still are views of the vector, and need no copy.
            moved = [(view, grad) for view, grad in found if view.data_ptr() != grad.data_ptr()]
            if moved:
                copy_each_([view for view, _ in moved], [grad for _, grad in moved])
            if len(moved) < len(found):
                # The exchange will write over these gradients.
                if self.replica.g.is_cuda:
                    self.finite = finite_flags(self.gradients)  # read only if a mean is not finite
                elif not all_finite(self.replica.g[self.part]):
                    self.culprit = self._first_nonfinite(in_place=True)
            if keep:
                own = self.replica.g[self.part]
                self.kept = host_copy(own, pinned=True, wait=False) if len(moved) < len(found) else None

    def gather_again(self) -> None:
        """Put the gradients back that an exchange was to send."""
        if self.kept is not None:
            self.replica.g[self.part].copy_(self.kept)
        else:
            self.gather(keep=True)

    def find_culprit(self) -> int:
        """The first parameter whose gradient on this rank was not finite, by its place in the bucket; -1 for none.

        For the time between the exchange and `expose`.
        """
        if self.finite is not None:
            return next((place for place, finite in enumerate(self.finite.tolist()) if not finite), -1)
        found = [place for place in (self.culprit, self._first_nonfinite(in_place=False)) if place >= 0]
        return min(found, default=-1)

    def _first_nonfinite(self, *, in_place: bool) -> int:
        """Of the parameters whose gradients are views of the vector, or of the others."""
        for place, (view, parameter) in enumerate(zip(self.gradients, self.parameters, strict=True)):
            grad = None if parameter.grad is None else plain(parameter.grad).to_dense()
            if grad is not None and (grad.data_ptr() == view.data_ptr()) == in_place and not all_finite(grad):
                return place
        return -1

    def in_use(self) -> bool:
        """Return True if gradients that are being computed lie in the memory that the bucket is sent from."""
        pairs = zip(self.gradients, self.parameters, strict=True)
        found = [(view, local(p.grad)) for view, p in pairs if p.grad is not None and view.numel()]
        # A sparse gradient has no memory of its own, and lies in no vector.
        return any(grad.layout == torch.strided and grad.data_ptr() == view.data_ptr() for view, grad in found)

    def expose(self) -> None:
        """Make every parameter's `grad` its part of the flat vector."""
        for gradient, parameter in zip(self.gradients, self.parameters, strict=True):
            if not (self.sharded and is_sharded(parameter)):
                # Another tensor of that memory: `p.grad.data = ...` and `model.to(...)` give it other memory.
                own, parameter.grad = parameter.grad, gradient.detach()
                if isinstance(own, BlockGradient):
                    parameter.grad = own.marking(parameter.grad)
            elif parameter.grad is None:
                parameter.grad = whole_like(gradient.clone(), parameter)
            else:
                local(parameter.grad).copy_(gradient)


def cut(
    replica: Replica, parameters: Sequence[Tensor], segments: Sequence[Segment], bucket_bytes: int, *, models: int = 1
) -> list[Bucket]:
    """Split one replica's gradient into buckets, last parameters first.

    Args:
        replica: whose gradient is split.
        parameters: in the order of the segments.
        segments: of the flat vector.
        bucket_bytes: the limit of a bucket, which its last parameter may exceed. The first bucket's is at most a
            megabyte, so that sending starts early. Buckets that grow step by step cost 2 to 3 % more CPU time, where a
            small model is sent to many workers.
        models: how many are stacked in each parameter; the limit is that of one of them.
    """
    gradients = views(replica.g, segments)
    buckets: list[Bucket] = []
    stop, limit = len(segments), min(_FIRST_BYTES, bucket_bytes)
    while stop:
        start, nbytes = stop, 0
        while start and nbytes < limit:
            start -= 1
            nbytes += segments[start].size // models * replica.g.element_size()
        part = slice(segments[start].start, segments[stop - 1].stop)
        buckets.append(Bucket(replica, list(parameters[start:stop]), gradients[start:stop], part))
        stop, limit = start, bucket_bytes
    return buckets


@dataclass
class ScaledResiduals:
    """Residuals of error feedback, scaled like the gradients while a backward pass exchanges these.

    Between passes they have the values that they would have without a scaler, so that checkpoints, switches and other
    numbers of workers need not know the scale. Scaling by a power of two, as a scaler's usual scales are, rounds
    nothing.

    Attributes:
        replicas: whose residuals they are.
        scaler: the loop's.
    """

    replicas: Sequence[Replica]
    scaler: torch.amp.GradScaler
    _scale: Tensor | None = None

    def begin(self) -> None:
        """Before the first bucket of a pass; does nothing where a worker was lost in it, and buckets are sent again."""
        if self._scale is not None:
            return
        # As a tensor of its device: `get_scale` would wait for a GPU.
        self._scale = self.scaler.scale(self.replicas[0].x.new_ones((), dtype=torch.float32))
        for residual in self._residuals():
            # One that is infinite would stay so. Gradients of that scale are infinite too, and their step is left out.
            most = torch.finfo(residual.dtype).max
            residual.mul_(self._scale.to(residual.device)).clamp_(-most, most)

    def end(self) -> None:
        """When all buckets of the pass have been waited for."""
        if self._scale is None:
            return
        for residual in self._residuals():
            residual.div_(self._scale.to(residual.device))
        self._scale = None

    def _residuals(self) -> list[Tensor]:
        return [x for r in self.replicas for name, x in r.state.items() if of_worker(name) or of_server(name)]


# -- the end of a pass -------------------------------------------------------------------------------------------------


class PassEnd:
    """The callback at the end of the outermost backward pass.

    The autograd engine holds the only reference. A pass that an exception ends drops it, and members of the pass
    detect that by their weak references.

    Attributes:
        node_frame: the Python frame of the node of the outer pass that called an inner pass. It is set when the inner
            pass ends, and None again when that node has ended.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self.node_frame: FrameType | None = None

    def queue(self) -> None:
        """Have the engine call this at the end of the pass that is running."""
        queue_callback(self)

    def __call__(self) -> None:
        """End the pass, or continue in the pass that this one runs within."""
        node = current_autograd_node()
        if node is None:  # the end of the outermost pass
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
        """Return True if the outer pass failed before the node that called the inner one had ended."""
        return self.node_frame is not None and not _on_stack(self.node_frame)

    def forget(self) -> None:
        """Never call `finish`."""
        self.node_frame = None


def _node_frame() -> FrameType | None:
    """Return the outermost frame of the node that has called the pass that ends now."""
    frame, last, engines = inspect.currentframe(), None, 0
    while frame is not None:
        engines += "run_backward" in frame.f_code.co_names
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


class Passes:
    """Ends backward passes for all workers of one model, in the order in which these were attached.

    The optimizers of one model may have a worker each. Ranks can use their parameters in different orders, or leave the
    parameters of one worker out. All ranks must exchange the gradients of the same workers in the same order, so with
    several workers each pass ends with a message of a few bytes.

    Attributes:
        members: the workers' gradients, in the order of attach.
    """

    def __init__(self) -> None:
        self.members: list[Backward] = []
        self._always: list[Backward] = []
        self._count = 0
        self._end: ref[PassEnd] | None = None

    def add(self, member: Backward) -> None:
        """Take in the worker that was attached last."""
        self._set([*self.members, member])

    def leave(self, member: Backward) -> None:
        """Forget a worker that is detached, or gets another strategy."""
        self._set([each for each in self.members if each is not member])

    def _set(self, members: list[Backward]) -> None:
        self.members, self._always, self._count = members, list(members), 0

    def sends_early(self, member: Backward) -> bool:
        """Return True if a member may send before the end of the pass, as on all ranks."""
        first = self.members[0]
        if len(self.members) == 1:
            return True
        # A rank that does not use the member must send what the others have sent, before it learns this.
        if self._count < _STEADY_PASSES or not any(member is each for each in self._always):
            return False
        # Messages that share connections with those of other workers have one order on all ranks.
        return member is first or member.comm.wires_key is not first.comm.wires_key

    def enter(self) -> ref[PassEnd]:
        """Return the end of the pass that is running; the first member that has a gradient queues it."""
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

    def end_failed(self, stepping: Backward, *, stepped: bool) -> None:
        """End a pass that an exception has stopped on this rank, with the other ranks; see `Backward.end_failed`."""
        states = {id(member): member.failed_state(stepped=stepped and member is stepping) for member in self.members}
        self._finish(lambda member: member.finish_failed(states[id(member)]))

    def _finish(self, finish: Callable[[Backward], None]) -> None:
        if (end := None if self._end is None else self._end()) is not None:
            end.forget()
        self._end = None
        used = self.members if len(self.members) == 1 else self._agree()
        for member in list(used):
            finish(member)

    def _agree(self) -> list[Backward]:
        """Return the members that any rank has used in this pass, and those that have sent already."""
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
        # Parameters that no rank has used are skipped, unless they were sent already: then a missing gradient counts as
        # zero.
        return [member for member, _, least in found if least or id(member) in sent_already]


# -- one worker's exchange ---------------------------------------------------------------------------------------------


class NonFinite(NamedTuple):
    """A gradient that is NaN or infinite.

    Attributes:
        rank: whose gradient it was; -1 where every rank's was finite and only their mean is not.
        parameter: its name.
    """

    rank: int
    parameter: str

    def error(self, step: int, comm: Comm) -> NonFiniteError:
        """Return the error that all ranks raise."""
        own = f"gradient of {self.parameter} on {comm.name(self.rank)}"
        whose = own if self.rank >= 0 else f"mean gradient of {self.parameter}"
        return NonFiniteError(
            f"step {step}: the {whose} is NaN or infinite; "
            'lower the learning rate, clip gradients, or leave out such steps with attach(..., nonfinite="skip")'
        )


# A rank's report of its backward pass if the mean of the gradients is not finite. `_ENDED_LATE`: a parameter
# accumulated gradient again after its bucket had been sent.
_ENDED, _ENDED_LATE, _FAILED, _FAILED_IN_USE, _FAILED_AND_STEPPED = range(5)


@dataclass
class Backward:
    """Observes backward passes and hands each bucket to `exchange` when all its gradients are final.

    A pass that fails leaves the other ranks waiting for the rest of its buckets. They are sent before anything else, as
    NaN: every rank then sees a mean that is not finite, and only then do the ranks exchange the reason. Where all have
    failed, the pass is forgotten; otherwise all raise.

    Attributes:
        buckets: in the order in which they are sent.
        exchange: the strategy's `on_gradient`.
        names: of the parameters, in the order of the buckets.
        find_unused: whether parameters without a gradient on any rank keep none.
        skips_steps: a rank may leave out a pass, and no others wait for it.
        raises_own: with `skips_steps`, a gradient of this rank that is not finite is an error before it is sent, as
            ranks that are not in step cannot ask each other whose it was.
        syncing: False while gradients accumulate locally.
        model: whose attribute `require_backward_grad_sync`, if it is False, does the same; None to ignore that.
        passes: ends the pass, with those of other workers of the same ranks.
        unused: parameters that had no gradient on this rank in the last pass.
        exchanged: gradients were exchanged since the last step, in the last pass.
        ended: a pass has ended since the hooks were registered.
        nonfinite: why their mean is not finite; None if it is. The same on all ranks, unless late ones skip steps.
        survives: runs an exchange, again where a worker was lost in it; None where that ends the run.
        on_begin: called before the first message of a pass, if not None.
        residuals: of error feedback under a GradScaler, in the units of the gradients while these are exchanged.
        scale: returns a factor of this worker's gradient in the mean, if not None.
    """

    buckets: list[Bucket]
    exchange: Exchange
    names: Sequence[str] = ()
    find_unused: bool = False
    skips_steps: bool = False
    raises_own: bool = False
    syncing: bool = True
    model: nn.Module | None = None
    passes: Passes = field(default_factory=Passes)
    unused: list[Tensor] = field(default_factory=list[Tensor])
    exchanged: bool = False
    ended: bool = False
    nonfinite: NonFinite | None = None
    survives: Callable[[Callable[[], None]], None] | None = None
    on_begin: Callable[[], None] | None = None
    residuals: ScaledResiduals | None = None
    scale: Callable[[], float] | None = None
    _launched: int = 0
    _early: int = 0
    _late: bool = False
    _adds: bool = False  # a pass has added this rank's own gradients to exchanged ones
    _users: Tensor | None = None
    _end: ref[PassEnd] | None = None
    _interrupted: bool = False
    _lost: tuple[type[CommError], str] | None = None
    _hinted: bool = False
    _nodes: list[torch.autograd.graph.Node] = field(default_factory=list[torch.autograd.graph.Node])

    def watch(self) -> Iterator[RemovableHandle]:
        """Register a hook on every parameter; yields the handles that remove them."""
        self.passes.add(self)
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                # A hook of the node that accumulates runs after all hooks of the tensor, also those registered later.
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._nodes.append(node)  # a parameter does not keep its node alive
                yield node.register_hook(self._hook(index, bucket))
        # Usually the first gradient: a pass that fails in a hook of its tensor has begun, and the others learn of it.
        yield self._nodes[len(self.buckets[0].parameters) - 1].register_prehook(self._before_first)

    def is_watching(self) -> bool:
        """Return True if the hooks are in place; a change of dtype or device drops them, also if it is undone."""
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        edges = map(torch.autograd.graph.get_gradient_edge, parameters)
        return all(edge.node is node for edge, node in zip(edges, self._nodes, strict=True))

    def _before_first(self, _: object) -> None:
        if self.syncing:
            end = None if self._end is None else self._end()
            self._enter(end)

    def _hook(self, index: int, bucket: Bucket) -> Callable[[object, object], None]:
        buckets = self.buckets

        def ready(_inputs: object, _outputs: object) -> None:
            if not self.syncing:
                self._adds |= self.exchanged
                return
            end = None if self._end is None else self._end()
            if (end is None or end.node_frame is not None) and not self._enter(end):
                self._adds |= self.exchanged
                return
            bucket.missing -= 1
            if bucket.missing == 0:
                # A complete bucket still waits for the ones before it: the order is the same on every rank.
                while self._launched < self._early and buckets[self._launched].missing <= 0:
                    self._launch(buckets[self._launched])
            elif bucket.missing < 0:
                bucket.expected += 1
                if index < self._launched:
                    # It is on its way, without this. `kept` has the sent gradients; the parameters' own gradients
                    # continue, unless they lie in the memory that is sent.
                    self._late, bucket.kept = True, None

        return ready

    def _enter(self, end: PassEnd | None) -> bool:
        """Begin a pass, unless one is running or gradients accumulate locally; returns whether one is running."""
        if end is not None and not end.is_abandoned():
            return True
        # Loops written for DistributedDataParallel set this attribute of the model.
        if self.model is not None and not getattr(self.model, "require_backward_grad_sync", True):
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        self.end_failed()
        if self.on_begin is not None:
            self.on_begin()
        if torch.is_grad_enabled():
            self.comm.raise_on_all(
                ConfigError(
                    f"{self._here}: backward(create_graph=True): averaged gradients have no graph, so second "
                    "derivatives would leave out what depends on them. Use torch.autograd.grad(loss, ..., "
                    "create_graph=True) for those, and call backward() on the final loss only"
                )
            )
        if self.exchanged and not self._hinted:
            self._hint_at_no_sync()
        self._launched, self._late, self._adds = 0, False, False
        # The last bucket is sent at the end of the pass, as a pass that fails must have something left to send.
        # Ranks that skip steps contribute all buckets together, and could not send them again.
        self._early = len(self.buckets) - 1 if self.passes.sends_early(self) and not self.skips_steps else 0
        for bucket in self.buckets:
            bucket.missing = bucket.expected
        self._end = self.passes.enter()

    def _hint_at_no_sync(self) -> None:
        """Warn of a second pass that adds to gradients which are averaged already."""
        parameter, view = self.buckets[-1].parameters[0], self.buckets[-1].gradients[0]
        if parameter.grad is None or not _lies_in(parameter.grad, view) or not view.any():
            return
        self._hinted = True
        _LOGGER.warning(
            "%s: a second backward pass since the last optimizer.step() adds to averaged gradients. Each pass sends "
            "all gradients. To accumulate locally, run all passes of a step but the last inside worker.no_sync()",
            self._here,
        )

    def _late_refusal(self) -> ConfigError:
        return ConfigError(
            f"{self._here}: a parameter accumulated gradient more often in this backward pass than in any before, "
            "after its gradient had been sent. Call optimizer.zero_grad(set_to_none=True), so that the gradient can be "
            "sent again, or run the part of the model that is used several times equally often in each pass"
        )

    def launch_early(self) -> None:
        """Send all buckets but the last, also without a pass."""
        while self._launched < len(self.buckets) - 1:
            self._launch(self.buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        bucket.gather(keep=self.survives is not None)
        self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self.residuals is not None:
            self.residuals.begin()
        if self.scale is not None and (factor := self.scale()) != 1:
            bucket.replica.g[bucket.part].mul_(factor)
        if self.survives is None:
            bucket.work = self.exchange(bucket.replica, bucket.part)
            return
        try:
            bucket.work = self.exchange(bucket.replica, bucket.part)
        except (PeerLostError, CommTimeoutError) as error:
            # Within the backward pass nothing can be done about it.
            self._lost = type(error), str(error)

    def refuse_own_gradients(self) -> None:
        """Refuse a step with gradients of this rank's own, which no pass has exchanged.

        Raises:
            ConfigError: on all ranks.
        """
        if (self.exchanged and not self._adds) or self.skips_steps:
            return
        # Those of the last exchange are views of the vector, also when a second step is taken with them.
        own = [
            name
            for (p, view), name in zip(self._gradients(), self.names, strict=False)
            if p.grad is not None and not is_sharded(p) and (self._adds or not _lies_in(p.grad, view))
        ]
        if own and not self.is_watching():
            self.comm.raise_on_all(
                ConfigError(
                    f"{self._here}: parameters were converted or moved, and back, since attach, which has dropped the "
                    "hooks of their gradients. Convert a copy to evaluate it: copy.deepcopy(model).half()"
                )
            )
        if own:
            self.comm.raise_on_all(
                ConfigError(
                    f"{self._here}: optimizer.step() with a gradient of {own[0]} that no backward pass has exchanged, "
                    "so workers would diverge: it was computed before attach or in no_sync(), or set by hand. "
                    "Call zero_grad() after attach, and let the last pass of a step run outside of no_sync()"
                )
            )

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for bucket in self.buckets:
            yield from zip(bucket.parameters, bucket.gradients, strict=True)

    def flush(self) -> None:
        """Send the remaining buckets, wait for all of them, and put the exchanged gradients in place.

        Called at the end of each backward pass; and by a rank without data, to take part in the others' exchange.

        Raises:
            MismatchError: on all ranks, if the pass has failed on some.
        """
        self.passes.flush()

    def flush_own(self) -> None:
        """`flush`, for the parameters of this worker."""
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self.unused = [p for p in parameters if p.grad is None]
        self._finish(_ENDED)

    def end_failed(self, *, stepped: bool = False) -> None:
        """After a failed pass, send what the other ranks wait for, and drop the pass if all have failed.

        Args:
            stepped: the optimizer was about to use its gradients.

        Raises:
            MismatchError: on all ranks, if the pass has failed on some and not on others.
            ConfigError: on all ranks, if the failed pass's gradients would be used, or if the pass has not ended.
            CommError: the last pass was interrupted while it waited for other ranks.
        """
        if self._interrupted and not self.skips_steps:
            for bucket in self.buckets:
                if bucket.work is not None:
                    bucket.work.wait()  # if connections are closed, this raises the reason
            raise CommError(f"{self._here}: a backward pass was interrupted while it waited for other ranks. Restart")
        if self._end is None:
            return
        end = self._end()
        if end is None or end.is_abandoned():
            self.passes.end_failed(self, stepped=stepped)
        elif stepped:
            self.comm.raise_on_all(
                ConfigError(
                    f"{self._here}: optimizer.step() inside a backward pass, before gradients are averaged. Call it "
                    "after backward() has returned, and not from a hook"
                )
            )

    @property
    def in_pass(self) -> bool:
        """Return True if a pass has used the worker's parameters, and has not been flushed yet."""
        return self._end is not None

    def failed_state(self, *, stepped: bool) -> int:
        """Return this rank's report of a failed pass."""
        if stepped:
            return _FAILED_AND_STEPPED
        return _FAILED_IN_USE if any(bucket.in_use() for bucket in self.buckets) else _FAILED

    def finish_failed(self, state: int) -> None:
        """`end_failed`, for the parameters of this worker."""
        if self.skips_steps:
            self._end = None
        else:
            self._finish(state)
        if state > _FAILED:
            # Where gradients are exchanged in the step, the others are waiting there, and do not know of it yet.
            self.comm.raise_on_all(self._refusal({self.comm.rank: state}))

    def _finish(self, state: int) -> None:
        """Send the remaining buckets and wait for all; where their mean is not finite, all ranks find out why."""
        # Not by way of `_end`, which a traceback may keep alive.
        self._end, self._interrupted, self.nonfinite = None, True, None
        for bucket in self.buckets[self._launched :]:
            if state == _ENDED:
                bucket.gather(keep=self._late or self.survives is not None)
            if state != _ENDED or self._late:
                bucket.replica.g[bucket.part].fill_(torch.nan)
            self._send(bucket)
        self._launched = 0
        try:
            if self.survives is None:
                self._collect(state)
            else:
                self.survives(self._repeatedly(state))
        finally:
            if self.residuals is not None:
                self.residuals.end()
        # Not before: the exchange may have to be repeated from these gradients.
        for bucket in self.buckets:
            if state == _ENDED:
                bucket.expose()
            bucket.work = bucket.kept = None
        if self._users is not None:
            self._drop_unused(self._users, state)

    def _repeatedly(self, state: int) -> Callable[[], None]:
        """`_collect`, which sends the same gradients again from its second call on."""
        sent = True

        def collect() -> None:
            nonlocal sent
            if not sent:
                self._send_again(state)
            sent = False  # also where this call has the result, as others may not have it, and all repeat it
            try:
                if self._lost is not None:
                    kind, text = self._lost
                    raise kind(text)
                self._collect(state)
            except (PeerLostError, CommTimeoutError):
                self._lost = None
                self.buckets[0].replica.pending_means.drop()
                raise

        return collect

    def _send_again(self, state: int) -> None:
        """Send all buckets once more, with all that the pass has accumulated."""
        self._late = False
        for bucket in self.buckets:
            if state == _ENDED:
                bucket.gather_again()
            else:
                bucket.replica.g[bucket.part].fill_(torch.nan)
            self._send(bucket)

    def _collect(self, state: int) -> None:
        """Wait for all buckets; where their mean is not finite, all ranks find out why."""
        users = self._count_users() if self.find_unused else None
        if self.raises_own and self.skips_steps:
            self._refuse_own()
        self.exchanged = state == _ENDED and any(bucket.work is not None for bucket in self.buckets)
        culprit, mean = self._wait()
        self._users = None if users is None else users.wait()
        self._interrupted, self.ended = False, True
        if mean >= 0 and not self.skips_steps and self._explain(state, culprit, mean):
            self._interrupted = True
            self._send_again(state)
            culprit, mean = self._wait()
            self._interrupted = False
            if mean >= 0:
                self._explain(state, culprit, mean)
        if mean >= 0 and self.skips_steps:
            self.nonfinite = NonFinite(
                self.comm.rank if culprit >= 0 else -1, self.names[culprit if culprit >= 0 else mean]
            )

    def _wait(self) -> tuple[int, int]:
        """Wait for all buckets.

        Returns:
            The place of a parameter whose gradient on this rank was not finite, and that of one whose mean is not; -1
            where there is none.
        """
        place, culprit, mean, finite = 0, -1, -1, self._all_finite_on_gpu()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if not finite and not all_finite(bucket.replica.g[bucket.part]):
                    # Of the last bucket, which has the model's first parameters.
                    culprit = place + found if (found := bucket.find_culprit()) >= 0 else culprit
                    mean = place + [all_finite(gradient) for gradient in bucket.gradients].index(False)
            if self.survives is None:
                bucket.work = None
            place += len(bucket.parameters)
        return culprit, mean

    def _all_finite_on_gpu(self) -> bool:
        """Return True if all that was exchanged is known to be finite; always False on the CPU.

        To look at a bucket waits for the GPU, so all are looked at together there. On the CPU one is looked at while
        the next is on its way.
        """
        works = [bucket.work for bucket in self.buckets if bucket.work is not None]
        devices = {bucket.replica.g.device for bucket in self.buckets}
        if len(works) < max(2, len(self.buckets)) or len(devices) > 1 or not self.buckets[0].replica.g.is_cuda:
            return False
        for work in works:
            work.wait()
        return all_finite_each([bucket.replica.g[bucket.part] for bucket in self.buckets])

    def _refuse_own(self) -> None:
        if all(all_finite_each(bucket.gradients) for bucket in self.buckets):
            return
        views = (view for bucket in self.buckets for view in bucket.gradients)
        own = next(name for name, view in zip(self.names, views, strict=True) if not all_finite(view))
        self.comm.raise_on_all(NonFinite(self.comm.rank, own).error(self.buckets[0].replica.step, self.comm))

    def _explain(self, state: int, culprit: int, mean: int) -> bool:
        """Tell all ranks how the pass has ended here, and which gradient was not finite before it was sent.

        Returns:
            Whether all ranks must send again, as a parameter of one of them accumulated gradient after it was sent.
        """
        comm, lost = self.comm, any(bucket.in_use() and bucket.kept is None for bucket in self.buckets)
        if state == _ENDED and self._late:
            state = _ENDED_LATE
        row = [state, culprit, int(lost)]
        mine = torch.tensor(row, dtype=torch.int64, device=self.buckets[0].replica.g.device)
        reports = [(int(theirs[0]), int(theirs[1]), bool(theirs[2])) for theirs in comm.all_gather(mine).wait()]
        failed = {rank: state for rank, (state, _, _) in enumerate(reports) if state > _ENDED_LATE}
        if 0 < len(failed) < comm.size or any(state != _FAILED for state in failed.values()):
            raise self._refusal(failed)
        if any(state == _ENDED_LATE for state, _, _ in reports):
            if any(lost for _, _, lost in reports):
                raise self._late_refusal()
            return True
        if not failed:
            guilty = ((rank, place) for rank, (_, place, _) in enumerate(reports) if place >= 0)
            rank, place = next(guilty, (-1, mean))
            self.nonfinite = NonFinite(rank, self.names[place])
        return False

    def _refusal(self, failed: dict[int, int]) -> MismatchError | ConfigError:
        """Return the error of a backward pass that did not end on these ranks."""
        ranks = self.comm.names(list(failed))
        if _FAILED_AND_STEPPED in failed.values():
            rank = next(rank for rank, state in failed.items() if state == _FAILED_AND_STEPPED)
            return ConfigError(
                f"{self._here}: {self.comm.name(rank)} called optimizer.step() after a backward pass that an "
                "exception had stopped, so that gradients were missing. Leave out the step too, on all ranks"
            )
        if len(failed) < self.comm.size:
            return MismatchError(
                f"{self._here}: the backward pass of {ranks} was stopped by an exception that was caught, while other "
                "ranks continued. Leave out a batch on all ranks or on none, or let the exception end the run"
            )
        return ConfigError(
            f"{self._here}: the backward pass of {ranks} was stopped by an exception, and gradients of the next one "
            "were added to the same memory. Call optimizer.zero_grad(set_to_none=True) after the exception"
        )

    @property
    def comm(self) -> Comm:
        """The ranks that the gradients travel between."""
        return self.buckets[0].replica.comm

    @property
    def _here(self) -> str:
        return f"{self.comm.name(self.comm.rank)}, step {self.buckets[0].replica.step}"

    def _count_users(self) -> Work[Tensor]:
        """On how many ranks each parameter has a gradient."""
        missing = {id(p) for p in self.unused}
        parameters = (p for bucket in self.buckets for p in bucket.parameters)
        mine = torch.tensor(
            [float(id(p) not in missing) for p in parameters],
            dtype=torch.float32,
            device=self.buckets[0].replica.g.device,
        )
        return self.comm.all_reduce_(mine)

    def _drop_unused(self, counts: Tensor, state: int) -> None:
        """Leave parameters without a gradient that have none on any rank."""
        parameters = (p for bucket in self.buckets for p in bucket.parameters)
        for parameter, count in zip(parameters, counts.tolist(), strict=True):
            if not count and state == _ENDED:
                parameter.grad = None


def _lies_in(grad: Tensor, view: Tensor) -> bool:
    return grad.layout == torch.strided and grad.data_ptr() == view.data_ptr()

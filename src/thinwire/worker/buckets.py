"""Gradient buckets: gathered and sent as soon as their gradients are final, during the backward pass.

The flat vector follows the order of the model's parameters. Gradients become final in roughly the opposite order, so
buckets are cut and sent from the end of the vector. Every rank sends them in the same order, whatever the order in
which its gradients become final; otherwise messages of different buckets would be matched with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thinwire.comm.work import Work
from thinwire.replica.flat import Segment, copy_each_, views
from thinwire.replica.replica import Replica
from thinwire.replica.shards import is_sharded, local, whole_like

_FIRST_BYTES = 1 << 20
Exchange = Callable[[Replica, slice], Work[Tensor] | None]


@dataclass
class Bucket:
    """Consecutive parameters of one replica whose gradients travel together.

    Attributes:
        replica: whose flat gradient the bucket is a part of.
        parameters: in the order of the vector.
        gradients: views of `replica.g`, one for each parameter.
        part: where the bucket lies in `replica.g`.
        missing: parameters whose gradient is not final yet in this pass.
        work: the exchange, while it is in flight.
    """

    replica: Replica
    parameters: list[Tensor]
    gradients: list[Tensor]
    part: slice
    missing: int = 0
    work: Work[Tensor] | None = None

    def gather(self) -> None:
        """Copy the parameters' gradients into the flat vector; a missing gradient counts as zero."""
        with torch.no_grad():
            found: list[tuple[Tensor, Tensor]] = []
            for gradient, parameter in zip(self.gradients, self.parameters, strict=True):
                if parameter.grad is None:
                    gradient.zero_()
                else:
                    found.append((gradient, local(parameter.grad).to_dense()))
            # After `zero_grad(set_to_none=False)` gradients still are views of the vector, and need no copy.
            moved = [(view, grad) for view, grad in found if view.data_ptr() != grad.data_ptr()]
            if moved:
                copy_each_([view for view, _ in moved], [grad for _, grad in moved])

    def expose(self) -> None:
        """Make every parameter's `grad` its part of the flat vector."""
        for gradient, parameter in zip(self.gradients, self.parameters, strict=True):
            if not is_sharded(parameter):
                parameter.grad = gradient
            elif parameter.grad is None:
                parameter.grad = whole_like(gradient.clone(), parameter)
            else:
                local(parameter.grad).copy_(gradient)


def cut(replica: Replica, parameters: Sequence[Tensor], segments: Sequence[Segment], bucket_bytes: int) -> list[Bucket]:
    """Split one replica's gradient into buckets, last parameters first.

    Args:
        replica: whose gradient is split.
        parameters: in the order of the segments.
        segments: of the flat vector.
        bucket_bytes: the limit of a bucket, which its last parameter may exceed. The first bucket's is at most a
            megabyte, so that sending starts early. Buckets that grow step by step cost 2 to 3 % more CPU time, where a
            small model is sent to many workers.
    """
    gradients = views(replica.g, segments)
    buckets: list[Bucket] = []
    stop, limit = len(segments), min(_FIRST_BYTES, bucket_bytes)
    while stop:
        start, nbytes = stop, 0
        while start and nbytes < limit:
            start -= 1
            nbytes += segments[start].size * replica.g.element_size()
        part = slice(segments[start].start, segments[stop - 1].stop)
        buckets.append(Bucket(replica, list(parameters[start:stop]), gradients[start:stop], part))
        stop, limit = start, bucket_bytes
    return buckets


@dataclass
class Backward:
    """Observes backward passes and hands each bucket to `exchange` when all its gradients are final.

    Attributes:
        buckets: in the order in which they are sent.
        exchange: the strategy's `on_gradient`.
        find_unused: whether parameters without a gradient on any rank keep none.
        syncing: False while gradients accumulate locally.
        unused: parameters that had no gradient on this rank in the last pass.
    """

    buckets: list[Bucket]
    exchange: Exchange
    find_unused: bool = False
    syncing: bool = True
    unused: list[Tensor] = field(default_factory=list[Tensor])
    _launched: int = 0
    _watching: bool = False

    def watch(self) -> Iterator[RemovableHandle]:
        """Register a hook on every parameter; yields the handles that remove them."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                yield parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if not self.syncing:
                return
            if not self._watching:
                self._begin()
            bucket.missing -= 1
            if bucket.missing == 0:
                # A complete bucket still waits for the ones before it: the order is the same on every rank.
                while self._launched < len(self.buckets) and self.buckets[self._launched].missing <= 0:
                    self._launch(self.buckets[self._launched])

        return ready

    def _begin(self) -> None:
        self._watching, self._launched = True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        # DDP and FSDP use the autograd engine's end-of-backward callback too; there is no public one.
        torch.autograd.Variable._execution_engine.queue_callback(self.flush)  # pyright: ignore

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        bucket.gather()
        bucket.work = self.exchange(bucket.replica, bucket.part)

    def flush(self) -> None:
        """Send the remaining buckets, wait for all of them, and put the exchanged gradients in place.

        Called at the end of each backward pass; and by a rank without data, to take part in the others' exchange.
        """
        if not self._watching:
            self._launched = 0
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self.unused = [p for p in parameters if p.grad is None]
        while self._launched < len(self.buckets):
            self._launch(self.buckets[self._launched])
        used = self._count_users(parameters) if self.find_unused else None
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work = None
            bucket.expose()
        self._watching = False
        if used is not None:
            for parameter, count in zip(parameters, used.wait().tolist(), strict=True):
                if not count:
                    parameter.grad = None

    def _count_users(self, parameters: Sequence[Tensor]) -> Work[Tensor]:
        """On how many ranks each parameter has a gradient."""
        replica = self.buckets[0].replica
        missing = {id(p) for p in self.unused}
        mine = torch.tensor([float(id(p) not in missing) for p in parameters], device=replica.g.device)
        return replica.comm.all_reduce_(mine)

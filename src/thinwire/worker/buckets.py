"""Gradients, gathered bucket by bucket as soon as they are final.

The flat vector is laid out in the order of the model's parameters, which gradients reach in roughly the opposite
order, so buckets are cut and launched from the end. Every rank launches them in the same order, whatever order its
gradients happen to be ready in.
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
    """Neighbouring parameters of one replica whose gradients travel together."""

    replica: Replica
    parameters: list[Tensor]
    gradients: list[Tensor]
    part: slice
    missing: int = 0
    work: Work[Tensor] | None = None

    def gather(self) -> None:
        """Copy the parameters' gradients into the flat vector; no gradient counts as zero."""
        with torch.no_grad():
            found: list[tuple[Tensor, Tensor]] = []
            for gradient, parameter in zip(self.gradients, self.parameters, strict=True):
                if parameter.grad is None:
                    gradient.zero_()
                else:
                    found.append((gradient, local(parameter.grad).to_dense()))
            moved = [(mine, theirs) for mine, theirs in found if mine.data_ptr() != theirs.data_ptr()]
            if moved:
                copy_each_([m for m, _ in moved], [t for _, t in moved])

    def expose(self) -> None:
        """Let every parameter's gradient be its part of the flat vector."""
        for gradient, parameter in zip(self.gradients, self.parameters, strict=True):
            if not is_sharded(parameter):
                parameter.grad = gradient
            elif parameter.grad is None:
                parameter.grad = whole_like(gradient.clone(), parameter)
            else:
                local(parameter.grad).copy_(gradient)


def cut(replica: Replica, parameters: Sequence[Tensor], segments: Sequence[Segment], bucket_bytes: int) -> list[Bucket]:
    """Cut one replica into buckets, last parameters first: small ones, so that the wire starts early, then larger ones.

    Args:
        replica: its gradient is cut.
        parameters: in the order of the segments.
        segments: of the flat vector.
        bucket_bytes: the most; the first bucket has a megabyte at most, each later one up to twice the one before.
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
        stop, limit = start, min(2 * limit, bucket_bytes)
    return buckets


@dataclass
class Backward:
    """Watches backward passes and hands each bucket to `exchange` when all its gradients are final.

    Attributes:
        buckets: in the order of launch.
        exchange: the strategy's `on_gradient`.
        syncing: off while gradients accumulate locally.
        unused: parameters that had no gradient in the last pass.
    """

    buckets: list[Bucket]
    exchange: Exchange
    find_unused: bool = False
    syncing: bool = True
    unused: list[Tensor] = field(default_factory=list[Tensor])
    _launched: int = 0
    _watching: bool = False

    def watch(self) -> Iterator[RemovableHandle]:
        """Put a hook on every parameter; yields the handles that remove them."""
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
                self._launch_ready()

        return ready

    def _begin(self) -> None:
        self._watching, self._launched = True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        # The engine's own end-of-backward callback is what DDP and FSDP use too.
        torch.autograd.Variable._execution_engine.queue_callback(self.flush)  # pyright: ignore

    def _launch_ready(self) -> None:
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing <= 0:
            self._launch(self.buckets[self._launched])

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        bucket.gather()
        bucket.work = self.exchange(bucket.replica, bucket.part)

    def flush(self) -> None:
        """Launch what is left, wait for everything, and put the exchanged gradients in place."""
        if not self._watching:
            self._launched = 0
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self.unused = [p for p in parameters if p.grad is None]
        while self._launched < len(self.buckets):
            self._launch(self.buckets[self._launched])
        used = self._vote(parameters, self.unused) if self.find_unused else None
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work = None
            bucket.expose()
        self._watching = False
        if used is not None:
            votes = used.wait().tolist()
            for parameter, count in zip(parameters, votes, strict=True):
                if not count:
                    parameter.grad = None

    def _vote(self, parameters: Sequence[Tensor], unused: Sequence[Tensor]) -> Work[Tensor]:
        """On how many ranks each parameter has a gradient."""
        replica = self.buckets[0].replica
        missing = {id(p) for p in unused}
        mine = torch.tensor([float(id(p) not in missing) for p in parameters], device=replica.g.device)
        return replica.comm.all_reduce_(mine)

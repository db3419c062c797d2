# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: gathered and sent as soon as their gradients are final, during the backward pass.

The flat vector follows the order of the model's parameters. Gradients become final in roughly the opposite order, so
buckets are cut and sent from the end of the vector. Every rank sends them in the same order, whatever the order in
which its gradients become final; otherwise messages of different buckets would be matched with each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thinwire.comm.base import Comm
from thinwire.comm.work import Work
from thinwire.errors import CommError, CommTimeoutError, ConfigError, MismatchError, NonFiniteError, PeerLostError
from thinwire.kernels import all_finite, all_finite_each
from thinwire.replica.flat import Segment, copy_each_, views
from thinwire.replica.replica import Replica
from thinwire.replica.shards import is_sharded, local, whole_like
from thinwire.worker.scaled_residuals import ScaledResiduals

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
        culprit: a parameter whose gradient was not finite before it was sent, by its place in the bucket; -1 for none.
        keeps: whether what the exchange writes over must be there to be sent again.
        kept: a copy of gradients that lie in the memory that is sent.
    """

    replica: Replica
    parameters: list[Tensor]
    gradients: list[Tensor]
    part: slice
    missing: int = 0
    work: Work[Tensor] | None = None
    culprit: int = -1
    keeps: bool = False
    kept: Tensor | None = None

    def gather(self) -> None:
        """Copy the parameters' gradients into the flat vector; a missing gradient counts as zero."""
        self.culprit = -1
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
            if len(moved) < len(found) and not all_finite(self.replica.g[self.part]):
                # The exchange will write over these gradients.
                self.culprit = self._first_nonfinite(in_place=True)
            if self.keeps:
                self.kept = self.replica.g[self.part].clone() if len(moved) < len(found) else None

    def gather_again(self) -> None:
        """Put the gradients back that an exchange was to send."""
        if self.kept is not None:
            self.replica.g[self.part].copy_(self.kept)
        else:
            self.gather()

    def find_culprit(self) -> int:
        """The first parameter whose gradient on this rank was not finite, by its place in the bucket; -1 for none.

        For the time between the exchange and `expose`.
        """
        found = [place for place in (self.culprit, self._first_nonfinite(in_place=False)) if place >= 0]
        return min(found, default=-1)

    def _first_nonfinite(self, *, in_place: bool) -> int:
        """Of the parameters whose gradients are views of the vector, or of the others."""
        for place, (view, parameter) in enumerate(zip(self.gradients, self.parameters, strict=True)):
            grad = None if parameter.grad is None else local(parameter.grad).to_dense()
            if grad is not None and (grad.data_ptr() == view.data_ptr()) == in_place and not all_finite(grad):
                return place
        return -1

    def in_use(self) -> bool:
        """Whether gradients that are being computed lie in the memory that the bucket is sent from."""
        pairs = zip(self.gradients, self.parameters, strict=True)
        found = [(view, local(p.grad)) for view, p in pairs if p.grad is not None]
        # A sparse gradient has no memory of its own, and lies in no vector.
        return any(grad.layout == torch.strided and grad.data_ptr() == view.data_ptr() for view, grad in found)

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


class NonFinite(NamedTuple):
    """A gradient that is NaN or infinite.

    Attributes:
        rank: whose gradient it was; -1 where every rank's was finite and only their mean is not.
        parameter: its name.
    """

    rank: int
    parameter: str

    def error(self, step: int, comm: Comm) -> NonFiniteError:
        """The error that all ranks raise."""
        own = f"gradient of {self.parameter} on {comm.name(self.rank)}"
        whose = own if self.rank >= 0 else f"mean gradient of {self.parameter}"
        return NonFiniteError(
            f"step {step}: the {whose} is NaN or infinite; "
            'lower the learning rate, clip gradients, or leave out such steps with attach(..., nonfinite="skip")'
        )


class _PassEnd:
    """The callback at the end of a backward pass.

    The autograd engine holds the only reference, so that a pass that has ended without it, by an exception, is known by
    its being gone. Passes within passes, as of checkpointed activations, do not end the outer one.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def __call__(self) -> None:
        self._flush()


# What a rank reports of its backward pass where the mean of the gradients is not finite.
_ENDED, _FAILED, _FAILED_IN_USE, _FAILED_AND_STEPPED = range(4)


@dataclass
class Backward:
    """Observes backward passes and hands each bucket to `exchange` when all its gradients are final.

    A pass that fails leaves the other ranks waiting for the rest of its buckets. They are sent before anything else, as
    NaN: every rank then sees a mean that is not finite, and only then do the ranks tell each other why. Where all have
    failed, the pass is forgotten; otherwise all raise.

    Attributes:
        buckets: in the order in which they are sent.
        exchange: the strategy's `on_gradient`.
        names: of the parameters, in the order of the buckets.
        find_unused: whether parameters without a gradient on any rank keep none.
        skips_steps: a rank may leave out a pass, and no others wait for it.
        raises_own: with `skips_steps`, a gradient of this rank that is not finite is an error before it is sent, as
            ranks that are not in step cannot ask each other whose it was.
        coded: gradients are compressed, so that a pass in several parts would not give what one pass gives.
        syncing: False while gradients accumulate locally.
        unused: parameters that had no gradient on this rank in the last pass.
        exchanged: gradients were exchanged since the last step, in the last pass.
        ended: a pass has ended since the hooks were registered.
        nonfinite: why their mean is not finite; None if it is. The same on all ranks, unless late ones skip steps.
        survives: runs an exchange, again where a worker was lost in it; None where that ends the run.
        residuals: of error feedback, in the units of the gradients while these are exchanged.
    """

    buckets: list[Bucket]
    exchange: Exchange
    names: Sequence[str] = ()
    find_unused: bool = False
    skips_steps: bool = False
    raises_own: bool = False
    coded: bool = False
    syncing: bool = True
    unused: list[Tensor] = field(default_factory=list[Tensor])
    exchanged: bool = False
    ended: bool = False
    nonfinite: NonFinite | None = None
    survives: Callable[[Callable[[], None]], None] | None = None
    residuals: ScaledResiduals = field(default_factory=ScaledResiduals)
    _launched: int = 0
    _end: ref[_PassEnd] | None = None
    _interrupted: bool = False
    _lost: tuple[type[CommError], str] | None = None

    def watch(self) -> Iterator[RemovableHandle]:
        """Register a hook on every parameter; yields the handles that remove them."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                yield parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        # The last bucket is sent at the end of the pass, as a pass that fails must have something left to send.
        early = len(self.buckets) - 1

        def ready(_: Tensor) -> None:
            if not self.syncing:
                return
            if self._end is None or self._end() is None:
                self._begin()
            bucket.missing -= 1
            if bucket.missing == 0:
                # A complete bucket still waits for the ones before it: the order is the same on every rank.
                while self._launched < early and self.buckets[self._launched].missing <= 0:
                    self._launch(self.buckets[self._launched])

        return ready

    def _begin(self) -> None:
        self.end_failed()
        # A mean of means is the same mean; a code of a code is not.
        if self.coded and _in_reentrant_checkpoint():
            raise ConfigError(
                f"{self._here}: the first gradient of the backward pass is from within checkpoint(use_reentrant=True), "
                "which runs a pass of its own, so that gradients would be coded and sent once for each such part; pass "
                "use_reentrant=False"
            )
        self._launched = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        end = _PassEnd(self.flush)
        self._end = ref(end)
        # DDP and FSDP use the autograd engine's end-of-backward callback too; there is no public one.
        torch.autograd.Variable._execution_engine.queue_callback(end)  # pyright: ignore

    def _launch(self, bucket: Bucket) -> None:
        self._launched += 1
        bucket.gather()
        self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        self.residuals.begin()
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
        if self.exchanged or self.skips_steps:
            return
        # Those of the last exchange are views of the vector, also when a second step is taken with them.
        own = [
            name
            for (p, view), name in zip(self._gradients(), self.names, strict=False)
            if p.grad is not None and not is_sharded(p) and not _lies_in(p.grad, view)
        ]
        if own:
            self._comm.raise_on_all(
                ConfigError(
                    f"{self._here}: optimizer.step() with a gradient of {own[0]} that no backward pass has exchanged, "
                    "so that workers would train apart: it was computed before attach or in no_sync(), or set by hand; "
                    "call zero_grad() after attach, and let the last pass of a step run outside of no_sync()"
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
        self.end_failed()
        if self._end is None:
            self._launched = 0
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self.unused = [p for p in parameters if p.grad is None]
        self._finish(_ENDED)

    def end_failed(self, *, stepped: bool = False) -> None:
        """Where the last pass has failed, send what the other ranks wait for, and forget the pass if all have failed.

        Args:
            stepped: the optimizer was about to use its gradients.

        Raises:
            MismatchError: on all ranks, if the pass has failed on some and not on others.
            ConfigError: on all ranks, if the failed pass's gradients would be used.
            CommError: the last pass was interrupted while it waited for other ranks.
        """
        if self._interrupted and not self.skips_steps:
            for bucket in self.buckets:
                if bucket.work is not None:
                    bucket.work.wait()  # where connections are closed, this says why
            raise CommError(
                f"{self._here}: a backward pass was interrupted while it waited for other ranks; start anew"
            )
        if self._end is None or self._end() is not None:
            return
        state = _FAILED
        if stepped:
            state = _FAILED_AND_STEPPED
        elif any(bucket.in_use() for bucket in self.buckets):
            state = _FAILED_IN_USE
        if self.skips_steps:
            self._end = None
        else:
            self._finish(state)
        if state != _FAILED:
            # Where gradients are exchanged in the step, the others are waiting there, and do not know of it yet.
            self._comm.raise_on_all(self._refusal({self._comm.rank: state}))

    def _finish(self, state: int) -> None:
        """Send the remaining buckets and wait for all; where their mean is not finite, all ranks find out why."""
        # Not by way of `_end`, which a traceback may keep alive.
        self._end, self._interrupted, self.nonfinite = None, True, None
        for bucket in self.buckets[self._launched :]:
            if state == _ENDED:
                bucket.gather()
            else:
                bucket.replica.g[bucket.part].fill_(torch.nan)
            self._send(bucket)
        self._launched = len(self.buckets)
        try:
            if self.survives is None:
                self._collect(state)
                return
            self.survives(self._repeatedly(state))
        finally:
            self.residuals.end()
        # Not before: a worker that is lost makes all repeat the exchange from these gradients.
        for bucket in self.buckets:
            if state == _ENDED:
                bucket.expose()
            bucket.work = bucket.kept = None

    def _repeatedly(self, state: int) -> Callable[[], None]:
        """`_collect`, which sends the same gradients again from its second call on."""
        sent = True

        def collect() -> None:
            nonlocal sent
            if not sent:
                for bucket in self.buckets:
                    if state == _ENDED:
                        bucket.gather_again()
                    else:
                        bucket.replica.g[bucket.part].fill_(torch.nan)
                    self._send(bucket)
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

    def _collect(self, state: int) -> None:
        """Wait for all buckets; where their mean is not finite, all ranks find out why."""
        used = self._count_users() if self.find_unused else None
        if self.raises_own and self.skips_steps:
            self._refuse_own()
        place, culprit, mean, finite = 0, -1, -1, self._all_finite_on_gpu()
        self.exchanged = state == _ENDED and any(bucket.work is not None for bucket in self.buckets)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                if not finite and not all_finite(bucket.replica.g[bucket.part]):
                    # Of the last bucket, which has the model's first parameters.
                    culprit = place + found if (found := bucket.find_culprit()) >= 0 else culprit
                    mean = place + [all_finite(gradient) for gradient in bucket.gradients].index(False)
            if self.survives is None:
                bucket.work = None
                if state == _ENDED:
                    bucket.expose()
            place += len(bucket.parameters)
        if used is not None:
            self._drop_unused(used.wait(), state)
        self._interrupted, self.ended = False, True
        if mean >= 0 and self.skips_steps:
            self.nonfinite = NonFinite(
                self._comm.rank if culprit >= 0 else -1, self.names[culprit if culprit >= 0 else mean]
            )
        elif mean >= 0:
            self._explain(state, culprit, mean)

    def _all_finite_on_gpu(self) -> bool:
        """Whether all that was exchanged is known to be finite; always False on the CPU.

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
        names = iter(self.names)
        own = [next(names) for bucket in self.buckets for view in bucket.gradients if not all_finite(view)]
        if own:
            self._comm.raise_on_all(NonFinite(self._comm.rank, own[0]).error(self.buckets[0].replica.step, self._comm))

    def _explain(self, state: int, culprit: int, mean: int) -> None:
        """Tell all ranks whether the pass has failed here, and which gradient was not finite before it was sent."""
        comm = self._comm
        mine = torch.tensor([state, culprit], dtype=torch.int64, device=self.buckets[0].replica.g.device)
        reports = [(int(theirs[0]), int(theirs[1])) for theirs in comm.all_gather(mine).wait()]
        failed = {rank: state for rank, (state, _) in enumerate(reports) if state != _ENDED}
        if 0 < len(failed) < comm.size or any(state != _FAILED for state in failed.values()):
            raise self._refusal(failed)
        if not failed:
            guilty = ((rank, place) for rank, (_, place) in enumerate(reports) if place >= 0)
            rank, place = next(guilty, (-1, mean))
            self.nonfinite = NonFinite(rank, self.names[place])

    def _refusal(self, failed: dict[int, int]) -> MismatchError | ConfigError:
        """The error of a backward pass that did not end on these ranks."""
        ranks = self._comm.names(list(failed))
        if _FAILED_AND_STEPPED in failed.values():
            rank = next(rank for rank, state in failed.items() if state == _FAILED_AND_STEPPED)
            return ConfigError(
                f"{self._here}: {self._comm.name(rank)} called optimizer.step() after a backward pass that an "
                "exception had stopped, so that gradients were missing; leave out the step too, on all ranks"
            )
        if len(failed) < self._comm.size:
            return MismatchError(
                f"{self._here}: the backward pass of {ranks} was stopped by an exception that was caught, while other "
                "ranks went on; leave out a batch on all ranks or on none, or let the exception end the run"
            )
        return ConfigError(
            f"{self._here}: the backward pass of {ranks} was stopped by an exception, and gradients of the next one "
            "were added to the same memory; call optimizer.zero_grad(set_to_none=True) after the exception"
        )

    @property
    def _comm(self) -> Comm:
        return self.buckets[0].replica.comm

    @property
    def _here(self) -> str:
        return f"{self._comm.name(self._comm.rank)}, step {self.buckets[0].replica.step}"

    def _count_users(self) -> Work[Tensor]:
        """On how many ranks each parameter has a gradient."""
        missing = {id(p) for p in self.unused}
        parameters = (p for bucket in self.buckets for p in bucket.parameters)
        mine = torch.tensor(
            [float(id(p) not in missing) for p in parameters],
            dtype=torch.float32,
            device=self.buckets[0].replica.g.device,
        )
        return self._comm.all_reduce_(mine)

    def _drop_unused(self, counts: Tensor, state: int) -> None:
        """Leave parameters without a gradient that have none on any rank."""
        parameters = (p for bucket in self.buckets for p in bucket.parameters)
        for parameter, count in zip(parameters, counts.tolist(), strict=True):
            if not count and state == _ENDED:
                parameter.grad = None


def _lies_in(grad: Tensor, view: Tensor) -> bool:
    return grad.layout == torch.strided and grad.data_ptr() == view.data_ptr()


def _in_reentrant_checkpoint() -> bool:
    """Whether a part of the model that is computed anew runs a backward pass within the backward pass."""
    # The end of that inner pass is all that a callback could be queued for.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_qualname == "CheckpointFunction.backward":
            return True
        frame = frame.f_back
    return False

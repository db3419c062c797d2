# SPDX-License-Identifier: Apache-2.0
"""What an ordinary loop asks of its surroundings, twice: by thinwire, and by hand.

A loop is written once. Under `WithThinwire` it runs as a user would write it: `attach`, then `loss.backward()` and
`optimizer.step()`. Under `ByHand` nothing of thinwire is imported: after each outermost backward pass the gradients are
averaged, or after each step the parameters, by a few lines over stacked tensors. Both must end at the same parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire
from tests.oracles.codecs import TwoStages
from thinwire import Comm, Worker

SIZE = 2


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw the parameters from a generator of their own, the same numbers in every dtype."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=draw, dtype=torch.float32))
    return model


def batch(rank: int, step: int, *, width: int = 4, out: int = 2, rows: int = 6) -> tuple[Tensor, Tensor]:
    """A rank's inputs and targets of a step, in the default dtype."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, width, generator=draw, dtype=torch.float32)
    y = torch.randn(rows, out, generator=draw, dtype=torch.float32) + rank
    kind = torch.get_default_dtype()
    return x.to(kind), y.to(kind)


class Kit:
    """What a loop is given.

    Attributes:
        rank: of this worker.
        size: the number of workers.
    """

    rank: int
    size = SIZE

    def attach(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Any:
        """Let the workers train this model together."""
        raise AssertionError

    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward()`."""
        raise AssertionError

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally."""
        raise AssertionError

    def detach(self) -> None:
        """Let the model go."""
        raise AssertionError

    def restart(self) -> None:
        """Begin from the parameters of now: for loops that load weights."""

    def mean_loss(self, loss: Tensor) -> Tensor:
        """What LBFGS decides by: the mean over workers where gradients are averaged."""
        return loss

    def batch(self, step: int, **shape: int) -> tuple[Tensor, Tensor]:
        """This worker's inputs and targets."""
        return batch(self.rank, step, **shape)


class WithThinwire(Kit):
    """A user's loop under thinwire."""

    def __init__(self, comm: Comm, recipe: str) -> None:
        self.comm, self.recipe, self.rank = comm, recipe, comm.rank
        self.workers: list[Worker] = []

    def attach(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Worker:
        # Buckets of a few parameters each, so that some are sent while the backward pass runs.
        options = {"bucket_bytes": 64, "timeout": 20.0, **options}
        self.workers.append(thinwire.attach(model, optimizer, self.recipe, comm=self.comm, **options))
        return self.workers[-1]

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.workers[-1].no_sync():
            yield

    def detach(self) -> None:
        for worker in self.workers:
            worker.detach()
        self.workers.clear()


class Table:
    """Where the ranks of a run by hand put their tensors for each other to read."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(SIZE, timeout=20.0)
        self._rows: list[Any] = [None] * SIZE

    def meet(self, rank: int, row: Any) -> list[Any]:
        """What every rank has brought."""
        self._rows[rank] = row
        self._meeting.wait()
        rows = list(self._rows)
        self._meeting.wait()
        return rows

    def abort(self) -> None:
        """Let the others stop waiting for a rank that has failed."""
        self._meeting.abort()


class Rule:
    """A method by hand, for one vector of parameters; nothing happens in this one."""

    averages_gradients = False

    def __init__(self, x: Tensor) -> None:
        self.anchor = x.to(torch.promote_types(x.dtype, torch.float32))

    def after_step(self, step: int, rows: Tensor, rank: int) -> Tensor:
        """The parameters of a rank after a step, from those of all ranks."""
        return rows[rank]


class MeanGradient(Rule):
    """Synchronous SGD."""

    averages_gradients = True


class CodedLocalSGD(Rule):
    """Average every second step: the anchor moves by the mean of what 4-bit messages with error feedback say."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.mean = TwoStages(nearest, 8, [x.numel()])

    def after_step(self, step: int, rows: Tensor, rank: int) -> Tensor:
        if step % 2:
            return rows[rank]
        self.anchor = self.anchor + self.mean((rows.to(self.anchor.dtype) - self.anchor).float()).to(self.anchor.dtype)
        return self.anchor


class DelayedDiLoCo(Rule):
    """Rounds of three steps, sent one step before their end; the outer optimizer is SGD with Nesterov momentum."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.sent, self.velocity = self.anchor, torch.zeros_like(self.anchor)

    def after_step(self, step: int, rows: Tensor, rank: int) -> Tensor:
        if step % 3 == 2:
            self.sent = rows.to(self.anchor.dtype).mean(0)
        if step % 3:
            return rows[rank]
        moved = self.anchor - self.sent
        self.velocity = 0.9 * self.velocity + moved
        self.anchor = self.anchor - 0.7 * (moved + 0.9 * self.velocity)
        return self.anchor


class PushSum(Rule):
    """Two workers that keep half and send half: weights stay one."""

    def after_step(self, step: int, rows: Tensor, rank: int) -> Tensor:
        return rows.mean(0)


def nearest(x: Tensor) -> Tensor:
    """Four bits an element, in blocks of eight."""

    def fitted(piece: Tensor) -> Tensor:
        half = 0.2101 * piece.abs().mean()
        if half == 0:
            return torch.zeros_like(piece)
        level = (2 * torch.floor(piece / half / 2) + 1).clamp(-15, 15)
        return level * (piece @ level) / (level @ level)

    return torch.cat([fitted(piece) for piece in x.split(8)]) if len(x) else x.clone()


METHODS: dict[str, Callable[[Tensor], Rule]] = {
    "AllReduce()": MeanGradient,
    "LocalSGD(period=2, codec=ErrorFeedback(Nearest(bits=4, block=8)))": CodedLocalSGD,
    "DiLoCo(period=3, delay=1)": DelayedDiLoCo,
    "PushSum()": PushSum,
}


class _Held:
    """One optimizer's trained parameters, in one vector for each dtype, and what its rule knows."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, rule: Callable[[Tensor], Rule]) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [p for p in model.parameters() if id(p) in held and p.requires_grad]
        kinds = {p.dtype: [q for q in trained if q.dtype == p.dtype] for p in trained}
        self.vectors: Sequence[list[Tensor]] = list(kinds.values())
        self.make = rule
        self.restart()

    def restart(self) -> None:
        self.rules = [self.make(flat(parameters)) for parameters in self.vectors]
        self.step = self.depth = 0

    def enter(self) -> None:
        # A class that calls `super().step()` runs the hooks of both.
        self.depth += 1

    def leave(self) -> bool:
        """Whether the step goes on in a class further down."""
        self.depth -= 1
        return self.depth > 0


class ByHand(Kit):
    """The same loop with averages by hand."""

    def __init__(self, table: Table, rank: int, recipe: str) -> None:
        self.table, self.rank, self.rule = table, rank, METHODS[recipe]
        self.held: list[_Held] = []
        self.handles: list[Any] = []
        self.syncing = True

    def attach(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        with torch.no_grad():
            for x in [*model.parameters(), *model.buffers()]:
                x.copy_(self.table.meet(self.rank, x.detach().clone())[0])
        held = _Held(model, optimizer, self.rule)
        self.held.append(held)
        self.handles.append(optimizer.register_step_pre_hook(lambda *_: held.enter()))
        self.handles.append(optimizer.register_step_post_hook(lambda *_: held.leave() or self._after_step(held)))

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        if not self.syncing:
            return
        for held in self.held:
            for parameters, rule in zip(held.vectors, held.rules, strict=True):
                missing = all(p.grad is None for p in parameters)
                if rule.averages_gradients and not all(self.table.meet(self.rank, missing)):
                    self._average_gradients(parameters)

    def _average_gradients(self, parameters: list[Tensor]) -> None:
        for p in parameters:
            own = torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
            mean = torch.stack(self.table.meet(self.rank, own.clone())).double().mean(0).to(p.dtype)
            if p.grad is None or p.grad.layout != torch.strided:
                p.grad = mean
            else:
                p.grad.data.copy_(mean)

    def _after_step(self, held: _Held) -> None:
        held.step += 1
        with torch.no_grad():
            for parameters, rule in zip(held.vectors, held.rules, strict=True):
                rows = torch.stack(self.table.meet(self.rank, flat(parameters)))
                found = rule.after_step(held.step, rows, self.rank).to(rows.dtype)
                for p, part in zip(parameters, found.split([p.numel() for p in parameters]), strict=True):
                    p.data.copy_(part.view_as(p))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = True

    def restart(self) -> None:
        for held in self.held:
            held.restart()

    def mean_loss(self, loss: Tensor) -> Tensor:
        if self.rule is not MeanGradient:
            return loss
        return torch.stack(self.table.meet(self.rank, loss.detach())).mean()

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.held.clear()
        self.handles.clear()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one vector, copied."""
    return torch.cat([x.detach().reshape(-1) for x in tensors]).clone()


Loop = Callable[[Kit], Any]


def attached(loop: Loop, recipe: str) -> list[Any]:
    """Each rank's result of a loop under thinwire."""

    def body(comm: Comm) -> Any:
        kit = WithThinwire(comm, recipe)
        try:
            return loop(kit)
        finally:
            kit.workers.clear()

    return thinwire.run_threads(SIZE, body, timeout=20.0)


def by_hand(loop: Loop, recipe: str) -> list[Any]:
    """Each rank's result of the same loop without thinwire."""
    table, found, errors = Table(), [None] * SIZE, list[BaseException]()

    def body(rank: int) -> None:
        try:
            found[rank] = loop(ByHand(table, rank, recipe))
        except BaseException as error:
            errors.append(error)
            table.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """`torch.set_default_dtype`, undone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

# SPDX-License-Identifier: Apache-2.0
"""Run an unmodified single-process training script on several workers.

The script's model and optimizer are found in its first forward pass in training mode, just before the pass, and are
attached there. Every worker runs the whole script, and reads its own part of the data.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import secrets
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from thinwire.errors import ConfigError
from thinwire.integrations.session import plain_model
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.attach import attach
from thinwire.worker.worker import Stats, Worker, internals_of

WORKERS = "THINWIRE_WORKERS"
RANK, SIZE = "THINWIRE_RANK", "THINWIRE_WORLD_SIZE"
"""Variables from which a script may read its place among the workers."""
ADD_LINES = (
    f'rank, size = int(os.environ["{RANK}"]), int(os.environ["{SIZE}"])\n'
    "sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=size, rank=rank)\n"
    "loader = DataLoader(dataset, sampler=sampler, batch_size=batch_size)"
)
_DRAW_LINES = "draws = numpy.random.default_rng()  # without a seed, so that each worker draws batches of its own"
# Scripts that read these variables would start DistributedDataParallel by themselves.
_HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_BY_HAND = "Call thinwire.attach(model, optimizer, strategy) in the script instead"
Object = TypeVar("Object")


@dataclass(frozen=True)
class Finished:
    """A script's run on this worker.

    Attributes:
        rank: of this worker.
        size: the number of workers.
        stats: what this worker has sent, and how long it has waited.
    """

    rank: int
    size: int
    stats: Stats


def run_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    strategy: Strategy | str = "AllReduce()",
    *,
    seed: int = 0,
    export: str | Path | None = None,
    note: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Finished:
    """Run a training script for one process as one of several workers.

    Every worker runs the whole script in a process of its own, under torchrun's variables. The script's model and
    optimizer are attached before its first forward pass in training mode. Until then all workers draw the same random
    numbers, so that their data sets, splits and models are equal. After it each rank but 0 has random numbers of its
    own. A `DataLoader` that is read for training (gradients are enabled, and the model is not in evaluation mode) gives
    each of `n` workers every `n`-th batch of one common order. Ranks other than 0 do not write files with `torch.save`.

    Args:
        script: the file.
        arguments: the script's own.
        strategy: the recipe.
        seed: of `torch`, `numpy` and `random` where the script sets none.
        export: a safetensors file for the model that all workers agree on, written when the script has ended.
        note: called on rank 0 with each message about the run.
        options: more for `attach`. With `rendezvous`, workers have no rank before they are attached, so each reads all
            data in an order of its own. Without a number of workers, each leaves the run when its script ends, and the
            others continue.

    Raises:
        ConfigError: the script has several candidates for the model or the optimizer, or none; a parameter moves
            otherwise under `attach` than by the optimizer alone; workers read the same batches; or `export` is given
            for workers that end at different steps.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from thinwire.integrations.script import run_script
        >>> with TemporaryDirectory() as folder:
        ...     script = Path(folder) / "train.py"
        ...     _ = script.write_text('''
        ... import torch
        ... model = torch.nn.Linear(2, 1)
        ... optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ... for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(4, 2)).square().mean().backward()
        ...     optimizer.step()
        ... ''')
        ...     run_script(script, strategy="LocalSGD(period=2)").stats.steps
        3
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give a Python script that trains a model, such as train.py")
    if not options.get("rendezvous") and not options.keys() & {"group", "comm", "mesh"}:
        options["rendezvous"] = os.environ.get("THINWIRE_RENDEZVOUS")  # as `attach` does
    if export is not None and options.get("rendezvous") and not (options.get("workers") or os.environ.get(WORKERS)):
        raise ConfigError(
            f"export={str(export)!r} with rendezvous: workers that join and leave at any time end at different steps, "
            f"so there is no model on which all agree at the end. Give workers=N, or set {WORKERS}"
        )
    run = _Run(strategy, options, note)
    with run.installed(seed), _as_program(path, arguments):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        return run.finish(export)


class _Run:
    """One worker's run of a script: finds the model and the optimizer, attaches them, and shares the data.

    Args:
        strategy: the recipe.
        options: more for `attach`.
        note: called on rank 0 with each message.
    """

    def __init__(self, strategy: Strategy | str, options: dict[str, Any], note: Callable[[str], None]) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.worker: Worker | None = None
        self._strategy, self._options = strategy, options
        # Workers that meet in a bucket have no rank before they are attached, and may join at any time.
        self._own_order = bool(options.get("rendezvous"))
        self._note = note if self.rank == 0 else lambda text: None
        self._environment = {name: os.environ[name] for name in _HIDDEN if name in os.environ}
        self._outermost: nn.Module | None = None
        self._parity: _Parity | None = None
        self._first_step = ExitStack()
        # Within attach and the attached optimizer's step, in which strategies may use optimizers of their own.
        self._busy = False
        self._seed = 0
        self._shares: WeakKeyDictionary[DataLoader[Any], _Share] = WeakKeyDictionary()
        self._saves_reported = False
        # Those of the process that runs the script are not the script's.
        self._earlier: WeakSet[Optimizer] = WeakSet(_alive(Optimizer))
        self._earlier_scalers: WeakSet[torch.amp.GradScaler] = WeakSet(_alive(torch.amp.GradScaler))

    @contextmanager
    def installed(self, seed: int) -> Generator[None]:
        """Within it, the script that runs is watched and its data are shared."""
        own = {} if self._own_order else {RANK: str(self.rank), SIZE: str(self.size)}
        with ExitStack() as undo:
            if torch.cuda.is_available() and int(self._environment.get("LOCAL_WORLD_SIZE", "1")) > 1:
                torch.cuda.set_device(int(self._environment["LOCAL_RANK"]) % torch.cuda.device_count())
            before = dict(os.environ)
            undo.callback(lambda: (os.environ.clear(), os.environ.update(before)))
            for name in _HIDDEN:
                os.environ.pop(name, None)
            os.environ.update(own)
            _seed_all(seed)
            undo.callback(register_module_forward_pre_hook(self._before_forward).remove)
            undo.callback(register_module_forward_hook(self._after_forward, always_call=True).remove)
            undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
            if self.size > 1 or self._own_order:
                self._share_data(undo)
            yield

    def finish(self, export: str | Path | None) -> Finished:
        """Write the model that all agree on, and detach it."""
        worker = self.worker
        if worker is None:
            raise ConfigError(
                "the script has ended without training a model: no module was called in training mode while an "
                f"optimizer held its parameters. {_BY_HAND}"
            )
        stats = worker.stats()
        if export is not None:
            worker.export(export)
        if worker.elastic is None:
            worker.detach()
        else:  # the others are not at the end of their scripts
            internals_of(worker).undo.close()
        return Finished(self.rank, self.size, stats)

    # -- the model and the optimizer -------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if self.worker is not None or self._outermost is not None:
            return
        self._outermost = module
        if module.training and torch.is_grad_enabled():
            found = _find(module, self._earlier)
            if found is not None:
                self._attach(*found)

    def _after_forward(self, module: nn.Module, *_: object) -> None:
        if module is self._outermost:
            self._outermost = None

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Refuse the step of an optimizer that was not found."""
        if self._busy:
            return
        worker = self.worker
        if worker is None:
            raise ConfigError(
                f"{type(optimizer).__name__} takes a step, but no module with its parameters was called in training "
                f"mode before. {_BY_HAND}"
            )
        if optimizer is worker.optimizer:
            self._busy = True
            return
        own = {id(p) for p in worker.model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"a second optimizer takes a step: {_described(optimizer)}. Only {_described(worker.optimizer)} is "
                f"attached. {_BY_HAND}, once for each optimizer"
            )

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.worker is not None and optimizer is self.worker.optimizer:
            self._busy = False
            self._first_step.close()  # here, where torch does not iterate over the optimizer's own hooks

    def _attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        alive = (each for each in _alive(torch.amp.GradScaler) if each not in self._earlier_scalers)
        scalers = [each for each in alive if each.is_enabled()]
        if len(scalers) > 1:
            raise ConfigError(f"the script has {len(scalers)} GradScalers: only one can be attached. {_BY_HAND}")
        self._parity = None if scalers else _Parity(optimizer, self._note)
        options: dict[str, Any] = {"scaler": scalers[0] if scalers else None, **self._options}
        # Before the hooks of attach, to run between the optimizer's step and the strategy's part of it.
        self._first_step.callback(optimizer.register_step_post_hook(self._check_parity).remove)
        os.environ.update(self._environment)
        self._busy = True
        try:
            self.worker = worker = attach(model, optimizer, self._strategy, **options)
        finally:
            self._busy = False
            for name in self._environment:
                os.environ.pop(name, None)
        internals = internals_of(worker)
        internals.refuses_equal_batches = _DRAW_LINES if self._own_order else ADD_LINES
        if worker.step:  # the optimizer has the others' state, and a copy from before has not
            self._parity = None
        if self._parity is not None:
            self._first_step.callback(optimizer.register_step_pre_hook(self._parity.before).remove)
        self._note(
            f"{type(model).__name__} with {sum(p.numel() for p in model.parameters()):,} parameters and "
            f"{_described(optimizer)}: attached with {worker.strategy} on {worker.comm.size} workers"
        )
        if worker.step:
            self._note(f"joins at step {worker.step}. The script's own counters and learning rates start from 0")
        in_step = worker.elastic is None and worker.comm.in_step and worker.strategy.traits.meets_every == 1
        if not in_step and (worker.comm.size > 1 or worker.elastic is not None):
            self._note("workers take their steps at their own pace, so it is not checked that they read other batches")
        self._seed = torch.initial_seed()
        if self._own_order or self.rank:
            _seed_all(secrets.randbits(32) if self._own_order else self._seed + self.rank)

    def _check_parity(self, *_: object) -> None:
        if self._parity is not None and self.worker is not None:
            problem = self._parity.problem()
            self._parity = None
            if problem:
                self.worker.comm.raise_on_all(ConfigError(f"{problem}. {_BY_HAND}"))

    # -- the data --------------------------------------------------------------------------------------------------

    def _share_data(self, undo: ExitStack) -> None:
        """Give each worker its part of what a DataLoader reads for training, and let rank 0 alone write files."""
        iterate, length, save = DataLoader.__iter__, DataLoader.__len__, torch.save

        def shared(loader: DataLoader[Any]) -> Any:
            if not _draws_indices(loader):
                return iterate(loader)
            batches = cast(Any, loader.batch_sampler)
            if (own := self._shares.get(loader)) is None:
                own = self._shares[loader] = _Share(batches, self._order)
            if self._trains and not own.epochs:
                self._report_share(length(loader))
            # DataLoader refuses an assignment after its construction; its iterators read the attribute once.
            vars(loader)["batch_sampler"] = own
            try:
                return iterate(loader)
            finally:
                vars(loader)["batch_sampler"] = batches

        def shared_length(loader: DataLoader[Any]) -> int:
            shares = self._trains and _draws_indices(loader) and not self._own_order
            return length(loader) // (self.size if shares else 1)

        def save_on_first(*arguments: Any, **more: Any) -> None:
            if not self._saves_reported:
                self._saves_reported = True
                self._note("torch.save writes on rank 0 only, which saves its own replica")
            if self.rank == 0:
                save(*arguments, **more)

        changed: list[tuple[Any, str, Any]] = [
            (DataLoader, "__iter__", shared),
            (DataLoader, "__len__", shared_length),
            *[(torch, "save", save_on_first)] * (self.size > 1),  # on one machine
        ]
        for owner, name, function in changed:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

    @property
    def _trains(self) -> bool:
        """True if data that are read now are for training."""
        return (self.worker is None or self.worker.model.training) and torch.is_grad_enabled()

    def _order(self, batches: Any, epoch: int) -> Iterator[Any] | None:
        """Return this worker's batches of an epoch; None if they are not for training."""
        if not self._trains:
            return None
        if self._own_order:
            return _in_own_order(batches)
        if self.worker is None:
            self._seed = torch.initial_seed()  # equal on all ranks until the model is attached
        return _every(batches, self.rank, self.size, self._seed + epoch)

    def _report_share(self, batches: int) -> None:
        if self._own_order:
            self._note(f"a DataLoader is read for training: each worker reads all {batches} batches in its own order")
            return
        if batches < self.size:
            raise ConfigError(
                f"a DataLoader has {batches} batches for {self.size} workers: each needs at least one. Use a smaller "
                "batch size, or fewer workers"
            )
        self._note(
            f"a DataLoader is read for training: each of {self.size} workers reads {batches // self.size} of its "
            f"{batches} batches in an epoch"
        )


def _draws_indices(loader: DataLoader[Any]) -> bool:
    """Return True if a DataLoader draws the indices of its batches, and not those of one rank."""
    own = isinstance(getattr(loader, "sampler", None), DistributedSampler)
    return loader.batch_sampler is not None and not own and not isinstance(loader.dataset, IterableDataset)


class _Share:
    """The batches of a DataLoader; if it is read for training, those of one worker.

    A loader with persistent workers reads the object of its first epoch in all epochs.
    """

    def __init__(self, batches: Any, order: Callable[[Any, int], Iterator[Any] | None]) -> None:
        self._batches, self._order = batches, order
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        found = self._order(self._batches, self.epochs)
        self.epochs += found is not None
        return iter(self._batches) if found is None else found


def _every(batches: Any, rank: int, size: int, seed: int) -> Iterator[Any]:
    """Yield every `size`-th batch of an order that is equal on all ranks; an incomplete last group is left out."""
    order = _drawn(batches, seed)
    while len(group := list(islice(order, size))) == size:
        yield group[rank]


def _in_own_order(batches: Any) -> Iterator[Any]:
    """Yield all batches in a worker's own random order."""
    seed = secrets.randbits(32)
    order = _drawn(batches, seed)
    if isinstance(getattr(batches, "sampler", None), SequentialSampler):
        rows = list(order)
        indices = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")
        order = (rows[index] for index in indices.tolist())
    yield from order


def _drawn(batches: Any, seed: int) -> Iterator[Any]:
    """Iterate over batches in the order of a seed: samplers draw it with the first batch."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    found = iter(batches)
    first = list(islice(found, 1))
    torch.default_generator.set_state(state)
    return chain(first, found)


class _Parity:
    """Compares the first step of an attached optimizer with that of a copy which is not attached.

    Args:
        optimizer: before it is attached.
        note: called where the two cannot be compared.
    """

    def __init__(self, optimizer: Optimizer, note: Callable[[str], None]) -> None:
        self._note = note
        self._pairs = [
            (p, nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        self._optimizer = optimizer
        self.plain: Optimizer | None = None
        try:
            self.plain = deepcopy(optimizer, {id(p): clone for p, clone in self._pairs})
        except Exception as error:  # a user's class may do anything
            self._give_up(error)

    def before(self, *_: object) -> None:
        """Copy the parameters and the gradients of the step that begins."""
        if self.plain is None:
            return
        with torch.no_grad():
            for p, clone in self._pairs:
                clone.copy_(p)
                clone.grad = None if p.grad is None else p.grad.clone()
        for own, group in zip(self._optimizer.param_groups, self.plain.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})

    def problem(self) -> str:
        """Take the step with the copy; returns how the attached parameters differ, empty if they do not."""
        plain, pairs = self.plain, self._pairs
        if plain is None:
            return ""
        try:
            plain.step()
        except Exception as error:
            self._give_up(error)
            return ""
        different = [(p, clone) for p, clone in pairs if not _same_bits(p, clone)]
        if not different:
            return ""
        p, clone = different[0]
        most = (p.detach() - clone.detach()).abs().max().item()
        return (
            f"the first step differs from that of the unmodified script: in {len(different)} of {len(pairs)} "
            f"parameters, by up to {most:g} in the first of them. {type(self._optimizer).__name__} must compute the "
            "same step under attach"
        )

    def _give_up(self, error: Exception) -> None:
        self.plain = None
        self._note(f"the first step cannot be compared with that of the unmodified script: {error}")


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _find(module: nn.Module, earlier: Collection[Optimizer]) -> tuple[nn.Module, Optimizer] | None:
    """Return the model and the optimizer that the script trains, when it calls this module; None where none is trained.

    Raises:
        ConfigError: there are several candidates.
    """
    optimizers = [each for each in _alive(Optimizer) if each.param_groups and each not in earlier]
    if not optimizers:
        return None
    held = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
    if not any(_parameters_of(module) & each for each in held):
        return None
    if len(optimizers) > 1:
        named = "; ".join(map(_described, optimizers))
        raise ConfigError(
            f"the script has {len(optimizers)} optimizers: {named}. A script with one optimizer can be run unmodified. "
            f"{_BY_HAND}, once for each optimizer"
        )
    holders = [each for each in _alive(nn.Module) if held[0] <= _parameters_of(each)]
    inside = {id(part) for each in holders for part in each.modules() if part is not each}
    models = {id(model): model for each in holders if id(each) not in inside for model in [plain_model(each)]}
    if len(models) == 1:
        return models.popitem()[1], optimizers[0]
    if models:
        names = ", ".join(type(model).__name__ for model in models.values())
        raise ConfigError(
            f"the script has {len(models)} models with all parameters of {_described(optimizers[0])}: {names}. It must "
            f"have one. {_BY_HAND}"
        )
    raise ConfigError(
        f"no module has all parameters of {_described(optimizers[0])}, such as {type(module).__name__}, which the "
        f"script calls. The parameters must belong to one model. {_BY_HAND}, with torch.nn.ModuleList(models)"
    )


def _alive(kind: type[Object]) -> list[Object]:
    """Return all objects of a class in this process that are in use."""
    gc.collect()
    # `type` and not `isinstance`, which proxies of other libraries answer by importing what they stand for.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _parameters_of(module: nn.Module) -> set[int]:
    try:
        return {id(p) for p in module.parameters()}
    except AttributeError:  # its constructor has failed
        return set()


def _described(optimizer: Optimizer) -> str:
    tensors = sum(len(group["params"]) for group in optimizer.param_groups)
    return f"{type(optimizer).__name__} over {tensors} tensors"


def _seed_all(seed: int) -> None:
    """Seed the generators that scripts draw from without naming one; the whole process is the script's."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % 2**32)


@contextmanager
def _as_program(path: Path, arguments: Sequence[str]) -> Generator[None]:
    """Within it, `sys.argv` and `sys.path` are those of `python path arguments`."""
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, places

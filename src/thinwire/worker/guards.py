# SPDX-License-Identifier: Apache-2.0
"""Detect changes to an attached model that would make workers diverge: at every step, and more in the first three.

In the first and the third step the ranks send each other 56 bytes, and nothing after that.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Literal, NoReturn, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from thinwire.core.comm.work import Work
from thinwire.core.replica.flat import views
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.shards import is_sharded, local
from thinwire.core.torch_internals import ACTIVE_DDP, HOOK_TABLES, forward_pre_hooks
from thinwire.errors import ConfigError, MismatchError
from thinwire.methods.strategies.base import Strategy, nested
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.worker.compatibility import check_start
from thinwire.worker.handshake import fingerprint, sum_of_bits
from thinwire.worker.members import Members, StackedModule
from thinwire.worker.state import WorkerState

InsideDDP = Literal["refuse", "mute"]

_AGAIN = "Call worker.detach() before it, and attach again after it"
_WRAPPERS = ("FullyShardedDataParallel", "DeepSpeedEngine")
_OPTIMIZERS = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer")
_FIRST_STEPS = 3
_START_CHECK, _DATA_CHECK = "a check of the start", "a check of the data"
_CHANGED = 1 << 62
_LOGGER = logging.getLogger("thinwire")
_OWN = "thinwire."
_SCALER_CODE = torch.amp.GradScaler.step.__code__


class _Owner:
    """Which optimizer moves an attached parameter, and whether it is doing so.

    Attributes:
        looked: whether the whole model was compared with the optimizer since `attach` or the last load.
    """

    def __init__(self, worker: WorkerState) -> None:
        # Weak, because the table of owners outlives every worker.
        self.worker = ref(worker)
        self.optimizer = ref(worker.optimizer)
        self.name = type(worker.optimizer).__name__
        self.skips_steps = worker.strategy.traits.skips_steps
        self.looked = False
        self.muted: WeakSet[DistributedDataParallel] = WeakSet()

    @property
    def stepping(self) -> bool:
        """Whether the optimizer's step is running, and has called this."""
        worker = self.worker()
        return worker is not None and within(inspect.currentframe(), worker.step_frame)

    def before_load(self) -> None:
        """Take the fingerprint of the parameters, unless they are to be put back anyway."""
        self.looked = False  # the load may replace parameters
        worker = self.worker()
        if worker is not None and not worker.lent and worker.fingerprint_before_load is None:
            worker.shards.read()
            worker.fingerprint_before_load = fingerprint(r.x for r in worker.replicas)

    def report_drift(self, use: str) -> None:
        """Warn once of a use of this worker's own model, if the other workers' parameters differ from its own."""
        worker = self.worker()
        if worker is None or worker.drift_reported or not differs(worker):
            return
        worker.drift_reported = True
        _LOGGER.warning(
            "%s, step %d: %s outside worker.consensus(). Between averages every worker has parameters of its own under "
            "%s, so this is the model of one worker and not the one that all agree on. Evaluate and save on all ranks "
            "within `with worker.consensus():`, and let rank 0 report or write there",
            *(worker.comm.name(worker.comm.rank), worker.step, use, str(worker.strategy)),
        )

    def refuse(self, text: str) -> None:
        """Raise an error on all ranks."""
        if (worker := self.worker()) is not None:
            refuse(worker, text)


_owners: Any = WeakIdKeyDictionary()
_others: Any = WeakIdKeyDictionary()  # all parameters of attached models, also those that are not trained
_harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # may step; with the number of their parameters
_owners_lock = threading.Lock()  # ranks may be threads
_hooks: list[RemovableHandle] = []
_registrations = [0]  # of modules and parameters in other modules, since the first attach of the process
_look_eagerly: list[Callable[[nn.Module, InsideDDP], None]] = []


def differs(worker: WorkerState) -> bool:
    """Return True if the model has parameters of this worker's own, which differ from those of others."""
    traits = worker.strategy.traits
    return not (worker.lent or not worker.step or traits.equal_replicas or traits.averages_at(worker.step))


def within(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Return True if a call was made in another one, which is still under way."""
    while outer is not None and frame is not None:
        frame = frame.f_back
        if frame is outer:
            return True
    return False


def refuse(worker: WorkerState, text: str) -> NoReturn:
    """Raise a `ConfigError` on all ranks, even if only one of them has detected the problem."""
    worker.comm.raise_on_all(ConfigError(f"{worker.comm.name(worker.comm.rank)}, step {worker.step}: {text}"))


class Attachment:
    """The parameters that `attach` laid out for one worker; every step compares the model with them.

    Args:
        worker: with its replicas.
        inside_ddp: what to do where the model is inside DistributedDataParallel.

    Attributes:
        owner: of the parameters.
        unsharded: the parameters that are views of a flat vector.
        places: their addresses.
    """

    def __init__(self, worker: WorkerState, inside_ddp: InsideDDP) -> None:
        trained = [p for parameters, _ in worker.layouts for p in parameters]
        held = [p for group in worker.optimizer.param_groups for p in group["params"]]
        self._trained = trained
        self.unsharded = [p for p in trained if not is_sharded(p)]
        self.places = [p.data_ptr() for p in self.unsharded]
        self._frozen = [p for p in held if not p.requires_grad]
        self._held, self._held_ids = held, list(map(id, held))  # held, so that no other tensor gets such an id
        self.owner = _Owner(worker)
        self._inside_ddp: InsideDDP = inside_ddp
        self._entries = (_owners, trained), (_others, list(worker.model.parameters()))
        with _owners_lock:
            for table, parameters in self._entries:
                for p in parameters:
                    table[p] = self.owner
            _harmless.clear()
        self._registrations = _registrations[0]
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_refuse_other_optimizers))
            _hooks.append(register_module_module_registration_hook(_note_registration))
            _hooks.append(register_module_parameter_registration_hook(_note_registration))
        if not _look_eagerly:
            # Traced, it would find and mute nothing. Made here, as it takes half a second to import what it needs.
            eager: Any = torch.compiler.disable(_look_for_ddp)
            _look_eagerly.append(eager)
        self._guard_model(worker)
        for module in worker.model.modules():
            worker.undo.callback(module.register_load_state_dict_pre_hook(_before_load).remove)
            _hide_hooks(worker, module)
        if worker.comm.size > 1:
            worker.undo.callback(worker.model.register_forward_pre_hook(_before_forward).remove)
            worker.undo.callback(worker.model.register_state_dict_pre_hook(_before_state_dict).remove)
        _guard_groups(worker)
        worker.undo.callback(self._release)

    def before_step(self, worker: WorkerState) -> None:
        """Refuse a step that would not move the parameters that workers exchange, or that only some workers take.

        Raises:
            ConfigError: with the change to the model or the optimizer, and its replacement.
        """
        if self._registrations != _registrations[0]:
            self._registrations, self.owner.looked = _registrations[0], False
        if not self.owner.looked or [p.data_ptr() for p in self.unsharded] != self.places:
            check_parameters(worker)
        held = [id(p) for group in worker.optimizer.param_groups for p in group["params"]]
        if held != self._held_ids or any(p.requires_grad for p in self._frozen):
            refuse(
                worker,
                "the optimizer trains other parameters than at attach (added, replaced, removed or unfrozen since), "
                f"and workers would not exchange them. {_AGAIN}",
            )
        if False in [p.requires_grad for p in self._trained]:  # faster than all()
            self._check_frozen(worker)
        if isinstance(worker.model, StackedModule):
            problem = worker.model.problem(worker.optimizer, worker.strategy)
            if problem:
                refuse(worker, problem)
        if worker.scaler is None and worker.comm.size > 1 and _called_by_scaler():
            refuse(
                worker,
                "a GradScaler calls the optimizer, and attach does not know of it, so that workers would skip "
                "different steps. Pass attach(..., scaler=scaler)",
            )
        if not self.owner.looked:
            self.owner.looked = True
            check_wrappers(worker.model, self._inside_ddp)
            self._guard_model(worker)

    def _check_frozen(self, worker: WorkerState) -> None:
        """Refuse parameters that were frozen since attach and would still move.

        A gradient that a strategy gives is zero and not none, and momentum, its own or the optimizer's, moves them.
        """
        strategy = worker.strategy
        if worker.find_unused and not strategy.traits.moves_parameters and not strategy.traits.reads_gradient:
            return
        refuse(worker, f"parameters were frozen since attach, and momentum would keep moving them. {_AGAIN}")

    def _guard_model(self, worker: WorkerState) -> None:
        """Look for DistributedDataParallel in every forward pass of the model, also where it is wrapped later."""
        hook = _mute_ddp if self._inside_ddp == "mute" else _refuse_ddp
        for module in worker.model.modules():
            wrapper = isinstance(module, DistributedDataParallel)
            if (wrapper or module is worker.model) and hook not in forward_pre_hooks(module):
                worker.undo.callback(module.register_forward_pre_hook(hook).remove)
                _hide_hooks(worker, module)  # of a module that has come since attach

    def _release(self) -> None:
        for wrapper in self.owner.muted:
            wrapper.require_backward_grad_sync = True
        with _owners_lock:
            for table, parameters in self._entries:
                for p in parameters:
                    if table.get(p) is self.owner:
                        del table[p]


def is_trained(parameter: Tensor) -> bool:
    """Return True if an attached optimizer trains the parameter."""
    return parameter in _owners


def check_parameters(worker: WorkerState) -> None:
    """Refuse parameters that have left the model or their memory, but take values that a loop has assigned, like SAM.

    Values of `p.data = ...` are copied into the flat vectors. Inside `consensus()` they are dropped at the end.

    Raises:
        ConfigError: on all ranks, if the model has other parameters, or one has another shape, dtype or device.
    """
    if worker.lent:
        return
    own = {id(p) for p in worker.model.parameters()}
    trained = [p for parameters, _ in worker.layouts for p in parameters if not is_sharded(p)]
    gone = sum(id(p) not in own for p in trained)
    if gone:
        refuse(
            worker,
            f"{gone} parameters of the optimizer are no longer the model's: they were replaced since attach (by a new "
            f"layer, a parametrization, fully_shard or load_state_dict(assign=True)). {_AGAIN}",
        )
    moved = moved_parameters(worker)
    if not moved:
        return
    same = all((p.shape, p.dtype, p.device) == (view.shape, view.dtype, view.device) for p, view in moved)
    if not same or (worker.backward is not None and not worker.backward.is_watching()):
        refuse(
            worker,
            "parameters have moved to other memory since attach (by model.to(...), .half() or a wrapper), so that "
            f"workers would diverge. {_AGAIN}",
        )
    with torch.no_grad():
        for p, view in moved:
            view.copy_(p)
            p.data = view


def moved_parameters(worker: WorkerState) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters that are no longer views of the flat vectors, each with its view."""
    return [
        (p, view)
        for replica, (parameters, segments) in zip(worker.replicas, worker.layouts, strict=True)
        for p, view in zip(parameters, views(replica.x, segments), strict=True)
        if not is_sharded(p) and p.data_ptr() != view.data_ptr()
    ]


def check_new(trained: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Refuse parameters that are attached already, and an optimizer that exchanges parameters by itself.

    Raises:
        ConfigError: with the parameter or the optimizer, and the fix.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if found := kinds.intersection(_OPTIMIZERS):
        raise ConfigError(
            f"{found.pop()}: it shards the optimizer state and sends parameters itself. Pass the "
            "optimizer that it was made from, and Sharded(SlowMo()) to shard the strategy's state"
        )
    for name, parameter in trained.items():
        if parameter in _owners:
            raise ConfigError(
                f"{name} is attached already, with {_owners[parameter].name}: two workers would keep two copies of it. "
                "Call detach() of the first worker before the second attach"
            )


def check_beside(model: nn.Module, strategy: Strategy) -> None:
    """Refuse a strategy whose late workers leave out steps, for one of several optimizers of a model.

    Raises:
        ConfigError: with the other optimizer, and the fix.
    """
    other = next((_owners[p] for p in model.parameters() if p in _owners), None)
    if other is not None and (strategy.traits.skips_steps or other.skips_steps):
        raise ConfigError(
            f"{strategy}: a part of the model is attached with {other.name}, and a late worker would leave out steps "
            "of one optimizer and not of the other, so that the parts belong to different steps. Use one optimizer, "
            "with parameter groups"
        )


def workers_beside(worker: WorkerState) -> list[WorkerState]:
    """Return the other workers that train parts of the same model with the same ranks."""
    own = {id(p) for p in worker.model.parameters()}
    with _owners_lock:
        owners = {id(owner): owner for owner in _owners.values()}
    found = [other for owner in owners.values() if (other := owner.worker()) is not None and other is not worker]
    return [
        other
        for other in found
        if other.comm.ranks_key is worker.comm.ranks_key and any(id(p) in own for p in other.model.parameters())
    ]


def check_wrappers(model: nn.Module, inside_ddp: InsideDDP) -> None:
    """Refuse a model of which a part is in a wrapper that exchanges gradients or parameters by itself.

    Raises:
        ConfigError: with the wrapper and the fix.
    """
    if inside_ddp not in ("refuse", "mute"):
        raise ConfigError(f'inside_ddp={inside_ddp!r}: must be "refuse" or "mute"')
    for name, module in model.named_modules():
        place = f"the model's {name}" if name else "the model"
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if found := kinds.intersection(_WRAPPERS):
            raise ConfigError(
                f"{place} is in {found.pop()}, which exchanges gradients and parameters itself. Pass the plain model, "
                "or shard it with fully_shard (FSDP2) and average parameters, as with SlowMo()"
            )
        if isinstance(module, DistributedDataParallel):
            _check_ddp(module, place, inside_ddp)


def _check_ddp(wrapper: DistributedDataParallel, place: str, inside_ddp: InsideDDP) -> None:
    if inside_ddp == "refuse":
        raise ConfigError(
            f"{place} is inside DistributedDataParallel, which averages gradients too: they would be sent twice. "
            'Leave the wrapper out, or pass attach(..., inside_ddp="mute") to keep it and turn its exchange off'
        )
    if wrapper.static_graph:
        raise ConfigError(
            f'{place} is inside DistributedDataParallel(static_graph=True) and inside_ddp="mute": its exchange of the '
            "first pass cannot be turned off. Create the wrapper without static_graph"
        )


def _hide_hooks(worker: WorkerState, module: nn.Module) -> None:
    """Leave thinwire's hooks out of copies and pickles of a module, which are not attached and may be read anywhere."""
    own = vars(module)
    if "__getstate__" in own:
        return
    this, reports = ref(module), module is worker.model and worker.comm.size > 1

    def state() -> Any:
        attached = this()
        assert attached is not None
        if reports:
            _report_drift(attached, "a copy of the model")
        found: Any = type(attached).__getstate__(attached)
        if not isinstance(found, dict):
            return found
        found = {name: value for name, value in cast(dict[str, Any], found).items() if name != "__getstate__"}
        for name in found.keys() & set(HOOK_TABLES):
            hooks = found[name].items()
            found[name] = OrderedDict(item for item in hooks if not getattr(item[1], "__module__", "").startswith(_OWN))
        return found

    # In the object itself, where `copy` and `pickle` look first, and past the `__setattr__` of a compiled model.
    own["__getstate__"] = state
    worker.undo.callback(own.pop, "__getstate__", None)


def _refuse_ddp(module: nn.Module, _: object) -> None:
    _look(module, "refuse")


def _mute_ddp(module: nn.Module, _: object) -> None:
    _look(module, "mute")


def _look(module: nn.Module, inside_ddp: InsideDDP) -> None:
    # A compiled graph is broken only where there is something to look at.
    if _wrapper_of(module) is not None:
        for look in _look_eagerly:
            look(module, inside_ddp)


def _before_load(module: nn.Module, *_: object) -> None:
    """Save the parameters before `load_state_dict` of an attached model or a part of it."""
    for owner in {_owners[p] for p in module.parameters() if p in _owners}:
        owner.before_load()


def _before_state_dict(module: nn.Module, _: str, keep_vars: bool) -> None:
    """Called before `state_dict()` of an attached model."""
    if not keep_vars:  # with it, the parameters themselves are looked up and not saved, as by `Worker.save`
        _report_drift(module, "model.state_dict()")


def _before_forward(module: nn.Module, _: object) -> None:
    """Called before every forward pass of an attached model."""
    # A compiled graph is not broken for this: its evaluation goes unreported.
    if not (module.training or torch.compiler.is_compiling() or torch.is_grad_enabled()):
        _report_drift(module, "evaluation of the model")


def _report_drift(module: nn.Module, use: str) -> None:
    for owner in {_owners[p] for p in module.parameters() if p in _owners}:
        owner.report_drift(use)


def _wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    if isinstance(module, DistributedDataParallel):
        return module
    return getattr(DistributedDataParallel, ACTIVE_DDP, None)


def _look_for_ddp(module: nn.Module, inside_ddp: InsideDDP) -> None:
    """Called before every forward pass of an attached model, or of a wrapper in it."""
    if (wrapper := _wrapper_of(module)) is None:
        return
    owner = next((_owners[p] for p in module.parameters() if p in _owners), None)
    if owner is None:
        return
    try:
        _check_ddp(wrapper, "the model", inside_ddp)
    except ConfigError as error:
        owner.refuse(str(error))
    # As its own `no_sync()` does. At every pass, as a trainer may set it back.
    if wrapper.require_backward_grad_sync:
        owner.muted.add(wrapper)
        wrapper.require_backward_grad_sync = False


def _note_registration(*_: object) -> None:
    _registrations[0] += 1


def _refuse_other_optimizers(optimizer: Optimizer, *_: object) -> None:
    """Called before every step of every optimizer: refuse one that moves an attached model and is not attached."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not held or _harmless.get(optimizer) == len(held):
        return
    first = _owners.get(held[0])
    # Optimizers that are made of another one, such as Lookahead, call that one's step within theirs.
    if first is not None and first.stepping:
        return
    trained, rest = ([owner for p in held if (owner := table.get(p)) is not None] for table in (_owners, _others))
    if not (trained or rest) or any(owner.optimizer() is optimizer for owner in trained):
        _harmless[optimizer] = len(held)
        return
    owner, name = (trained or rest)[0], type(optimizer).__name__
    if owner.stepping:
        return
    moves, fix = "moves parameters that are", "Call the step of the attached one, or attach this one instead"
    if not trained:
        moves = "moves other parameters of a model that is"
        fix = "Attach it too, or keep its parameters outside the attached model"
    owner.refuse(
        f"{name} {moves} attached with another optimizer, {owner.name}: its steps exchange nothing, so workers would "
        f"diverge. {fix}"
    )


def _guard_groups(worker: WorkerState) -> None:
    """Refuse `optimizer.add_param_group`, whose parameters would not be exchanged."""
    optimizer: Any = worker.optimizer

    def refused(_: dict[str, Any]) -> None:
        refuse(worker, f"add_param_group() after attach: workers would not exchange the new parameters. {_AGAIN}")

    def restore() -> None:
        vars(optimizer).pop("add_param_group", None)

    optimizer.add_param_group = refused
    worker.undo.callback(restore)


def _called_by_scaler() -> bool:
    """Return True if an enabled GradScaler is calling the optimizer's step."""
    # A scaler leaves no trace in most optimizers, and has no hook.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _SCALER_CODE:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


# -- the first steps ---------------------------------------------------------------------------------------------------


class FirstSteps:
    """Check the first three steps of a worker, together with the other ranks.

    Ranks that do not take their steps together send nothing: each of them refuses settings that need an agreement.

    Args:
        worker: before its first step.
        init: as for `attach`.
    """

    def __init__(self, worker: WorkerState, init: Literal["broadcast", "own"]) -> None:
        self._init = init
        self._gradients: list[int] = []
        self._calls = 0
        # As of now: a loop with several networks may freeze some of them for a while. Those that another optimizer
        # trains are its worker's.
        held = {id(p) for parameters, _ in worker.layouts for p in parameters}
        worker.frozen = [p for p in worker.model.parameters() if id(p) not in held and not p.requires_grad]
        worker.start_fingerprint = _fingerprint(worker)
        worker.own_gradient = 0
        if worker.backward is not None:
            worker.backward.exchange = partial(_record_and_exchange, worker)

    # -- the start -------------------------------------------------------------------------------------------------

    def check_start(self, worker: WorkerState, *, begins: bool = True) -> None:
        """Restart before the first step if all ranks have made the same change to the parameters since `attach`.

        Args:
            worker: of this rank.
            begins: whether the first step follows. Otherwise the parameters may still be changed after this.

        Raises:
            MismatchError: on all ranks, if the parameters now differ between ranks; names the ranks that changed them.
            ConfigError: on all ranks, if the ranks cannot agree on the change.
        """
        self._calls = 0  # of a step that has failed
        if worker.start_fingerprint is None:
            return
        number = _fingerprint(worker)
        changed = number != worker.start_fingerprint
        worker.start_fingerprint, worker.fingerprint_before_load = None if begins else number, None
        worker.frozen = [] if begins else worker.frozen
        if worker.comm.size > 1 and not _step_together(worker):
            if changed:
                run = str(worker.strategy) if worker.survives is None else "elastic=True"
                refuse(
                    worker,
                    f"parameters were changed after attach. Under {run} the ranks cannot agree on a new start. Load or "
                    "edit the weights before attach",
                )
            return
        mine = number % _CHANGED + _CHANGED * changed
        with worker.account.times.apart():
            found = worker.comm.gather_in_step(_START_CHECK, mine).wait()
        equal = len({each % _CHANGED for each in found}) == 1
        ranks = [rank for rank, each in enumerate(found) if each >= _CHANGED]
        problem = self._problem(worker, ranks, equal=equal) if ranks else ""
        if worker.mesh is not None:
            blocks = worker.mesh.block.whole.gather_in_step(_START_CHECK, int(bool(problem))).wait()
            if any(blocks) and not problem:
                problem = "the parameters of other blocks of the model were changed after attach on some ranks"
        if problem:
            raise MismatchError(f"step {worker.step}: {problem}. Load or edit the weights before attach")
        if ranks and not worker.resumed:
            check_start(worker.strategy, equal=equal)
            _start_again(worker, equal=equal)

    def _problem(self, worker: WorkerState, ranks: list[int], *, equal: bool) -> str:
        """Why the worker cannot start from what these ranks have changed; empty if it can."""
        whose = "all ranks" if len(ranks) == worker.comm.size else worker.comm.names(ranks)
        if worker.resumed:
            if len(ranks) == worker.comm.size and not keeps_copies(worker):
                return ""  # a local update, as in any later step
            return f"the parameters of {whose} were changed after worker.load(), whose state belongs to others"
        if equal or (self._init == "own" and not worker.strategy.traits.sends_gradients):
            return ""
        return (
            f"the parameters of {whose} were changed after attach, and now differ between ranks. Every rank must start "
            "from the same parameters"
        )

    # -- the gradients ---------------------------------------------------------------------------------------------

    def record_gradient(self, worker: WorkerState) -> None:
        """Add up this rank's own gradients, where they are not exchanged during the backward pass."""
        if worker.backward is not None or worker.own_gradient is None:
            return
        for parameters, _ in worker.layouts:
            for grad in (local(p.grad) for p in parameters if p.grad is not None):
                dense = grad if grad.layout == torch.strided else grad.coalesce().values()
                worker.own_gradient += sum_of_bits(dense)

    def _compare_gradients(self, worker: WorkerState) -> None:
        """Warn of ranks whose own gradients were equal and not zero in each of the first steps, or refuse them."""
        if worker.comm.size == 1 or worker.strategy.traits.meets_every > 1 or not _step_together(worker):
            return
        number = 0
        if all(self._gradients):
            for each in self._gradients:
                number = (31 * number + each) % (1 << 63)
        with worker.account.times.apart():
            numbers = worker.comm.gather_in_step(_DATA_CHECK, number).wait()
        equal = [value for value, count in Counter(numbers).items() if value and count > 1]
        ranks = [rank for rank, value in enumerate(numbers) if equal and value == equal[0]]
        if equal and worker.refuses_equal_batches:
            raise MismatchError(
                f"step {worker.step}: {worker.comm.names(ranks)} computed the same gradients in each of the first "
                f"{_FIRST_STEPS} steps, because they read the same batches. Each rank must read its own part of the "
                f"data. Add to the script:\n{worker.refuses_equal_batches}"
            )
        if equal and worker.comm.rank == 0:
            _LOGGER.warning(
                "step %d: %s computed the same gradients in each of the first %d steps. They probably read the same "
                "batches, and do the work of one. Give each rank its own part of the data: "
                "DataLoader(dataset, sampler=worker.sampler(dataset))",
                *(worker.step, worker.comm.names(ranks), _FIRST_STEPS),
            )

    # -- the optimizer's own calls ---------------------------------------------------------------------------------

    def enter_update(self, worker: WorkerState) -> None:
        """Count calls from here on as the optimizer's own."""
        self._calls -= worker.comm.count_other_calls()

    def leave_update(self, worker: WorkerState) -> None:
        """Count calls from here on as the worker's or the closure's."""
        self._calls += worker.comm.count_other_calls()

    def _check_calls(self, worker: WorkerState) -> None:
        calls, self._calls = self._calls, 0
        if not calls:
            return
        name = type(worker.optimizer).__name__
        found = f"{name}.step() makes collective calls of its own ({calls} in this step)"
        if not worker.strategy.traits.equal_replicas:
            refuse(
                worker,
                f"{found}. Under {worker.strategy!s} ranks have different parameters and gradients, which the "
                "optimizer would mix up. Use an optimizer that updates all parameters on every rank, or AllReduce()",
            )
        if worker.comm.rank == 0:
            _LOGGER.warning("step %d: %s, which worker.comm.meter does not count", worker.step, found)

    def end_step(self, worker: WorkerState) -> bool:
        """After the optimizer's update; returns whether this was the last step to be checked.

        Raises:
            ConfigError: on all ranks, if the optimizer communicates and the ranks' parameters differ.
        """
        self.leave_update(worker)
        self._check_calls(worker)
        self._gradients.append(worker.own_gradient or 0)
        worker.own_gradient = 0
        if len(self._gradients) < _FIRST_STEPS:
            return False
        worker.own_gradient = None
        if worker.backward is not None:
            worker.backward.exchange = worker.strategy.on_gradient
        self._compare_gradients(worker)
        return True


def _record_and_exchange(worker: WorkerState, replica: Replica, part: slice) -> Work[Tensor] | None:
    """Add up this rank's own gradients before they are exchanged."""
    worker.own_gradient = (worker.own_gradient or 0) + sum_of_bits(replica.g[part])
    return worker.strategy.on_gradient(replica, part)


def rebase(worker: WorkerState) -> None:
    """Take changes of the parameters so far as the worker's own, and not as the training loop's."""
    worker.fingerprint_before_load = None
    if worker.start_fingerprint is not None:
        worker.start_fingerprint = _fingerprint(worker)


def check_loaded(worker: WorkerState) -> None:
    """Refuse weights that were loaded between two steps, if the strategy keeps copies of earlier parameters.

    Weights that were put back before the step, as after an evaluation of averaged weights, are no change.

    Raises:
        ConfigError: on all ranks.
    """
    before = worker.fingerprint_before_load
    if before is None or worker.start_fingerprint is not None:
        return
    worker.fingerprint_before_load = None
    worker.shards.read()
    if fingerprint(r.x for r in worker.replicas) == before:
        return
    if keeps_copies(worker):
        refuse(
            worker,
            f"load_state_dict() of the model between two steps. {worker.strategy!s} keeps copies of the "
            "parameters, and would move them back. Use worker.load(), or call worker.detach(), load on all ranks, "
            "and attach again",
        )
    if worker.comm.size > 1 and not worker.strategy.traits.equal_replicas and _step_together(worker):
        # A rank that has loaded alone would be averaged with the others.
        with worker.account.times.apart():
            worker.comm.check_in_step("model.load_state_dict()").wait()


def keeps_copies(worker: WorkerState) -> bool:
    """Return True if the strategy's state or messages in flight refer to earlier parameters."""
    own_restarts = (Strategy.restart, Wrapper.restart, Members.restart)
    if all(type(each).restart in own_restarts for each in nested(worker.strategy)):
        return False
    for replica in worker.replicas:
        least = min((part.x.numel() for part in replica.tree()), default=1) / worker.comm.size
        copies = (x for x in replica.state.values() if x.is_floating_point() and x.numel() >= max(least, 1))
        if replica.inflight or any(True for _ in copies):
            return True
    return False


def _step_together(worker: WorkerState) -> bool:
    """Return True if all ranks take each of their first steps, and at the same time."""
    comm = worker.comm
    return (
        worker.survives is None and not worker.strategy.traits.skips_steps and comm.in_step and comm.checks_first_steps
    )


def _start_again(worker: WorkerState, *, equal: bool) -> None:
    """Give the strategy the state of a start from the parameters of now."""
    with torch.no_grad(), worker.account.apart():
        for replica in worker.replicas:
            replica.equal_start = equal
            if worker.strategy.traits.sends_gradients:
                # Of the gradient that was just exchanged, its residuals for one, the state stays.
                worker.strategy.restart(replica)
            else:
                replica.wait_pending()
                replica.inflight.clear()
                replica.state.clear()
                worker.strategy.start(replica)


def _fingerprint(worker: WorkerState) -> int:
    """Of the trained and the frozen parameters."""
    worker.shards.read()
    frozen = [local(p.data) for p in worker.frozen]
    return fingerprint([*(r.x for r in worker.replicas), *(x for x in frozen if x.layout == torch.strided)])


def check_first_gradient(worker: WorkerState) -> None:
    """Refuse a step after a switch whose gradient was computed before it, and so was not exchanged.

    Raises:
        ConfigError: on all ranks.
    """
    worker.just_switched = False
    has_gradient = any(p.grad is not None for parameters, _ in worker.layouts for p in parameters)
    if worker.backward is not None and not worker.backward.ended and has_gradient:
        worker.comm.raise_on_all(ConfigError(switched_between(worker)))


def switched_between(worker: WorkerState) -> str:
    """Return the error of a switch between the two halves of a step."""
    return (
        f"step {worker.step}: switch() between backward() and optimizer.step(): the gradient "
        "is what the strategy before it makes of it. Call switch() after optimizer.step()"
    )

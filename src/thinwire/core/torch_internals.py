# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that thinwire uses, each with what it is for.

No other file uses one. All were checked with torch 2.13, and `tests/test_torch_internals.py` checks the installed
version. Where a version of torch lacks a name, its entry here says what happens. "Refused" means that a call raises a
`ConfigError` with the name and the purpose. Names are looked up once, when this module is imported, so that a call
costs what it costs in torch.

Two kinds of names with an underscore are not here: `Tensor._version`, which torch's notes on autograd document, and
the keys of state dicts, which are a file format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

# Stable since torch 1.8, and the base of `torch.func` and of the profilers' counters. `torch.utils.pytree` lacks
# `tree_map_only`, and dispatch modes have no public name. Without them this module cannot be imported.
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.errors import ConfigError

__all__ = ["TorchDispatchMode", "pytree"]

_C: Any = vars(torch)["_C"]
_FUNCTORCH: Any = getattr(_C, "_functorch", None)


def named(home: Any, name: str, purpose: str) -> Any:
    """Return a private name, or a function that refuses the call where torch lacks it."""
    found = getattr(home, name, None)
    if found is not None:
        return found

    def refuse(*_: object, **__: object) -> Any:
        raise ConfigError(
            f"torch {torch.__version__} has no {name}: {purpose} needs it. Use torch 2.13, or another version with it"
        )

    return refuse


# -- lists of tensors --------------------------------------------------------------------------------------------------

foreach: Any = SimpleNamespace(
    **{name.removeprefix("_foreach_"): getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_")}
)
"""The operations on lists of tensors, without their prefix: `foreach.add_(xs, ys)` is `torch._foreach_add_(xs, ys)`.

One call for many tensors: one kernel on a GPU. They are a family rather than a corner: torch has had them since 1.9,
its own optimizers are built on them, and there is no public name. A missing one is an AttributeError.
"""

flatten: Callable[[list[Tensor]], Tensor] = named(
    vars(torch)["_utils"], "_flatten_dense_tensors", "a look at many small tensors"
)
"""Copy dense tensors of any shapes into one vector, in one call, as torch's DDP does; refused where it is missing."""
foreach_norm: Any = getattr(torch, "_foreach_norm", None)
"""What `torch.nn.utils.clip_grad_norm_` calls; None where torch lacks it, and then it calls a public function."""
unscale_kernel: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
"""What a `GradScaler` calls with the gradients and `found_inf`; None where torch lacks it."""

gpu_sleep: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)
"""Keep a stream of the GPU busy for a number of cycles, with which kernels are timed apart from their launches."""


# -- processes ---------------------------------------------------------------------------------------------------------

default_store: Callable[[], Any] = named(dist.distributed_c10d, "_get_default_store", "a process group's roll call")
"""Return the store of the default process group, over which ranks report failures; refused where it is missing."""


def process_groups() -> list[Any]:
    """Return torch's process groups in this process; groups without this rank are numbers; empty where unknown."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return [*getattr(world, "pg_map", ())]


def sequence_number(group: Any) -> int:
    """Return how many collective calls a process group has had; 0 where torch does not say.

    Raises:
        RuntimeError: the backend does not count.
    """
    return int(getattr(group, "_get_sequence_number_for_group", lambda: 0)())


operation_of: Callable[[Any], Any] = named(getattr(dist, "Work", None), "_get_op_type", "an elastic run's comm")
"""Return which collective a `torch.distributed.Work` belongs to; refused where it is missing."""


ACTIVE_DDP = "_active_ddp_module"
"""Attribute of the class DistributedDataParallel: the wrapper whose forward pass is running, for torch's compiler.

A name and not a function, since every forward pass of an attached model reads it. Where torch lacks it, a wrapper is
found by its own hook only.
"""


# -- backward passes ---------------------------------------------------------------------------------------------------

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
queue_callback: Callable[[Callable[[], None]], None] = named(_engine, "queue_callback", "exchanging gradients")
"""Have the autograd engine call a function at the end of the running backward pass; refused where it is missing.

DDP and FSDP2 use it too.
"""
current_autograd_node: Callable[[], Any] = named(_C, "_current_autograd_node", "exchanging gradients")
"""Return the node that the autograd engine runs on this thread, or None; refused where it is missing."""
plain_tensors: Any = named(_C, "DisableTorchFunctionSubclass", "a subclass of Tensor")
"""Context manager: inside, subclasses of Tensor are computed with as plain tensors; refused where it is missing.

For subclasses with their own `__torch_function__`, as torch's page on extending torch shows.
"""


# -- optimizers and scalers --------------------------------------------------------------------------------------------


def wrap_unscale(scaler: torch.amp.GradScaler, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Replace the function by which a scaler unscales gradients and finds overflows.

    `GradScaler` has no hook for it. `ShardedGradScaler` overrides the same method. Refused where it is missing.

    Args:
        scaler: the scaler.
        wrap: given the present function of (optimizer, inv_scale, found_inf, allow_fp16), which returns `found_inf` by
            device, returns the new one.

    Returns:
        A function that puts the present function back.
    """
    return _wrap(scaler, "_unscale_grads_", "a GradScaler whose ranks skip the same steps", wrap)


def wrap_scaler_step(scaler: torch.amp.GradScaler, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Replace the function by which a scaler calls the optimizer, or skips the step; refused where it is missing.

    Args:
        scaler: the scaler.
        wrap: given the present function of (optimizer, state, ...), where `state["found_inf_per_device"]` has the
            overflows, returns the new one.

    Returns:
        A function that puts the present function back.
    """
    return _wrap(scaler, "_maybe_opt_step", "a GradScaler of an elastic worker that trains locally", wrap)


def _wrap(scaler: torch.amp.GradScaler, name: str, use: str, wrap: Callable[[Callable[..., Any]], Any]) -> Any:
    before = named(scaler, name, use)
    setattr(scaler, name, wrap(before))
    return partial(setattr, scaler, name, before)


def unscales_itself(optimizer: Optimizer) -> bool:
    """Return True if a scaler does not unscale gradients for this optimizer, such as a fused one."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_unscales_itself(optimizer: Optimizer, value: bool) -> None:
    """Set `unscales_itself`."""
    optimizer._step_supports_amp_scaling = value  # pyright: ignore[reportAttributeAccessIssue]


def inner_schedulers(scheduler: Any) -> tuple[Any, ...]:
    """Return the schedulers inside a `ChainedScheduler` or a `SequentialLR`; none where torch lacks the list."""
    return tuple(getattr(scheduler, "_schedulers", ()))


def is_scheduled(step: Any) -> bool:
    """Return True if a scheduler has wrapped this `step` of an optimizer; False where torch does not mark it."""
    return hasattr(step, "_wrapped_by_lr_sched")


OPTIMIZER_IMPORTS = ("torch._dynamo",)
"""What torch imports when an optimizer is made, which takes as long as torch itself; a launcher imports it earlier."""


# -- modules -----------------------------------------------------------------------------------------------------------

HOOK_TABLES = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
"""Attributes of a module that hold its hooks; a missing one is passed over."""


def forward_pre_hooks(module: nn.Module) -> Collection[Any]:
    """Return a module's hooks before its forward pass; none where torch lacks the table."""
    hooks: Mapping[int, Any] = getattr(module, "_forward_pre_hooks", {})
    return hooks.values()


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if hooks run before or after a module's forward pass; False where torch lacks the tables."""
    return any(vars(module).get(table) for table in ("_forward_hooks", "_forward_pre_hooks"))


def hooks_of(module: nn.Module) -> list[list[Any]]:
    """Return a module's hooks of the forward and the backward pass, by table; none where torch lacks a table."""
    tables = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [list((vars(module).get(table) or {}).values()) for table in tables]


def is_checkpointing() -> bool:
    """Return True inside `checkpoint(..., use_reentrant=False)` of `torch.utils`; False where torch cannot tell."""
    own: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    top = getattr(own._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return True if hooks run when a tensor's gradient is computed or accumulated."""
    return any(getattr(tensor, table, None) for table in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def tensor_dicts(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return a module's own dictionaries of parameters and of buffers, which can be written to.

    The public iterators have neither the entries that are None nor tied ones. Every version of torch has them.
    """
    attributes = vars(module)
    return attributes["_parameters"], attributes["_buffers"]


def compiled_module(model: nn.Module) -> nn.Module | None:
    """Return the module inside what `torch.compile` returned; None for any other module."""
    return model.get_submodule("_orig_mod") if hasattr(model, "_orig_mod") else None


DROPOUTS: tuple[type[Any], ...] = (vars(nn.modules.dropout)["_DropoutNd"],)
"""The base of dropout layers, which other packages derive from, too. Without it this module cannot be imported."""
BATCH_NORMS: tuple[type[Any], ...] = (vars(nn.modules.batchnorm)["_BatchNorm"],)
"""The base of batch normalization, which other packages derive from, too. Without it this module cannot be imported."""


def check_batch_norm_input(module: nn.Module, input: Tensor) -> None:
    """Run a batch normalization layer's own check of its input's shape; no effect if torch lacks it."""
    check: Any = getattr(module, "_check_input_dim", None)
    if check is not None:
        check(input)


RNN_CACHES = ("_flat_weights", "_flat_weight_refs", "_flat_weights_names")
"""Attributes in which recurrent layers keep their parameters a second time."""


def refresh_rnn_weights(module: nn.RNNBase) -> None:
    """Let a recurrent layer use its current parameters; no effect if torch keeps no second list."""
    names: Any = getattr(module, "_flat_weights_names", None)
    if names is not None:
        module._flat_weights = [getattr(module, name, None) for name in names]  # pyright: ignore


# -- functions ---------------------------------------------------------------------------------------------------------


def without_dispatch(function: Any) -> Any:
    """Return a copy of a function of `torch.nn.functional` that runs its own code under a mode that intercepts it.

    Such a function first asks `has_torch_function`, and hands the call to the active mode. The copy always gets False,
    so that the mode sees the functions which it calls. Refused where torch lacks the name.
    """
    if "has_torch_function" not in function.__code__.co_names:
        return named(None, "has_torch_function", f"{function.__name__} in an array of models")
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


safe_softmax: Callable[[Tensor, int], Tensor] = named(torch, "_safe_softmax", "attention in an array of models")
"""Softmax with zeros where all scores are minus infinity, as in torch's attention; refused where it is missing."""
weight_norm: Any = getattr(torch, "_weight_norm", None)
"""What weight normalisation calls; None where torch lacks it, and then it calls public functions."""
SAMPLERS: tuple[Any, ...] = tuple(
    getattr(torch, name) for name in ("_standard_gamma", "_sample_dirichlet") if hasattr(torch, name)
)
"""Functions that `torch.distributions` draws with; a missing one is not called by it either."""


# -- torch.vmap --------------------------------------------------------------------------------------------------------


def _of_vmap(name: str) -> Any:
    return named(_FUNCTORCH, name, "an array of models")


# The parts of `torch.vmap`, for `fusion/batch.py`. There is no public way to see the batched tensor inside it. Each is
# refused where it is missing.
vmap_level: Callable[[], int | None] = _of_vmap("maybe_current_level")
"""Return the number of the innermost active transform."""
level_of: Callable[[Tensor], int] = _of_vmap("maybe_get_level")
"""Return the transform that batches a tensor; -1 for none."""
unbatched: Callable[[Tensor], Tensor] = _of_vmap("get_unwrapped")
"""Return the tensor of all examples."""
batch_axis_of: Callable[[Tensor], int] = _of_vmap("maybe_get_bdim")
"""Return its axis of examples."""
add_batch_axis: Callable[[Tensor, int, int], Tensor] = _of_vmap("_add_batch_dim")
"""Return a tensor as one example's, given the axis and the level."""
remove_batch_axis: Callable[[Tensor, int, int, int], Tensor] = _of_vmap("_remove_batch_dim")
"""Return all examples of a tensor, given the level, their number, and the axis to put them at."""
enter_vmap: Callable[[int, str], int] = _of_vmap("_vmap_increment_nesting")
"""Begin a transform over so many examples, with the rule for random functions; returns its level."""
leave_vmap: Callable[[], Any] = _of_vmap("_vmap_decrement_nesting")
"""End the innermost transform."""
suspend_vmap: Callable[[], Any] = _of_vmap("pop_dynamic_layer_stack")
"""Take the innermost transform off, and return it."""
resume_vmap: Callable[[Any], Any] = _of_vmap("push_dynamic_layer_stack")
"""Put a transform back."""


def load_vmap_rules() -> None:
    """Load the rules of operations that vmap batches by their decompositions; no effect if torch lacks them."""
    home: Any = getattr(getattr(torch, "_functorch", None), "predispatch", None)
    load = getattr(home, "lazy_load_decompositions", None)
    if load is not None:
        load()

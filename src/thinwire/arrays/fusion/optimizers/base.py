# SPDX-License-Identifier: Apache-2.0
"""The base of all optimizers of an array: every hyperparameter is a vector, and every slot counts its own steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.arrays.fusion.optimizers.parameter_batch import (
    DeviceValues,
    Group,
    ParameterBatch,
    count_models,
    inactive_unchanged,
    on_host,
    slots_of,
)
from thinwire.arrays.fusion.recording import RECORDER, is_capturing
from thinwire.arrays.fusion.store import Selection, check_slot, is_of, is_shared, owner_of
from thinwire.core.torch_internals import is_scheduled, set_unscales_itself
from thinwire.errors import ConfigError

Numbers = float | Sequence[float] | Tensor
# Options that change the formula, and that an array has for all its models, or not at all.
_SHARED = ("amsgrad", "centered", "maximize", "decoupled_weight_decay")
# Of hyperparameters that are more than not negative.
_RANGES = {
    **dict.fromkeys(("beta1", "beta2", "rho"), (0.0, 1.0)),
    "dampening": (-inf, inf),
    "nesterov": (0.0, 2.0),
}


def ranges_of(*names: str) -> dict[str, tuple[float, float]]:
    """Return hyperparameters with the half-open interval that each must be in."""
    return {name: _RANGES.get(name, (0.0, inf)) for name in names}


class FusedOptimizer(Optimizer):
    """The base of all optimizers of an array.

    A hyperparameter is a number for all models or a sequence with one per model, and is kept in
    `param_groups[...]["lr"]` as a float64 vector [models] on the CPU that may be edited in place between steps. A slot
    that is not `active` is left unchanged, bitwise, and no model's numbers affect another's.

    On a GPU a step reads copies of these vectors there, which are refreshed when the vectors have changed. Step counts
    are kept on the GPU too, so no step waits for it.

    Subclasses define the formula twice: `update_` by calls of torch for all models, which runs everywhere, and, if they
    have a `row_kernel`, `update_rows_`, which runs where the tensors fit it.

    Args:
        params: of an array, or groups of them.
        defaults: hyperparameters by name, checked against `ranges`.
        models: the number of models; None finds it from the parameters.
        shared: options that are the same for all models.

    Raises:
        ConfigError: a value out of its range, or a sequence that is not one per model.
    """

    ranges: ClassVar[dict[str, tuple[float, float]]]
    """Hyperparameters, and the half-open interval that each must be in."""
    state_names: ClassVar[tuple[str, ...]]
    """States that are kept per parameter."""
    torch_class: ClassVar[type[Optimizer] | None] = None
    """The same optimizer of torch, whose state dicts `extract` and `insert` exchange."""
    row_kernel: bool = False
    """Whether `update_rows_` is defined."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        defaults: dict[str, Any],
        *,
        models: int | None = None,
        **shared: Any,
    ) -> None:
        given = list(params)
        self.models = count_models(given) if models is None else models
        self.active = torch.ones(self.models, dtype=torch.bool, device="cpu")
        self.changes = 0  # counts what may replace tensors, for captured steps
        self._shared = tuple(shared)
        self.skipped: Tensor | None = None  # inside `skipping`, the slots of which steps leave everything unchanged
        self._on_device: dict[tuple[int, torch.device], DeviceValues] = {}
        super().__init__(given, {**defaults, **shared})  # pyright: ignore[reportArgumentType]
        set_unscales_itself(self, True)  # so that a scaler of torch calls `step`, which refuses it

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a scheduler of torch, which begins by wrapping `step`.

        Raises:
            ConfigError: with what to use instead.
        """
        if name == "step" and is_scheduled(value):
            raise ConfigError(
                "a scheduler of torch knows one learning rate, and an array's optimizer has one for each model. Use "
                "fusion.Schedules(optimizer, factory), which makes one scheduler for each model, with a factory such "
                "as lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9)"
            )
        super().__setattr__(name, value)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with hyperparameters of their own, each a number or one per model.

        Raises:
            ConfigError: a value out of its range, or a sequence that is not one per model.
        """
        # One beta per model cannot be edited inside a tuple: they are kept as two hyperparameters.
        self.changes += 1
        betas = param_group.pop("betas", None) or self.defaults.get("betas")
        if betas is not None:
            if len(betas) != 2:
                raise ConfigError(f"betas={betas!r}: a pair, each a number or one per model")
            param_group.update(beta1=betas[0], beta2=betas[1])
        for name in self.ranges:
            param_group[name] = self._vector(name, param_group.get(name, self.defaults.get(name)))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.pop("betas", None)
        for parameter in group["params"]:
            if parameter.is_complex():
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} is complex: the formulas are those of real numbers. "
                    "Hold its torch.view_as_real, and take torch.view_as_complex of it in forward()"
                )
            if is_shared(parameter) and parameter.requires_grad:
                raise ConfigError(
                    f"a trainable parameter of shape {list(parameter.shape)} is shared by all models. The "
                    "hyperparameters of an array's optimizer belong to single models. Pass array.own_parameters() "
                    "here, and array.shared_parameters() to an optimizer of torch"
                )
            if owner_of(parameter) is None and parameter.shape[:1] != (self.models,):
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)}: the first axis must be the {self.models} models"
                )

    def _vector(self, name: str, value: Any) -> Tensor:
        found = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().cpu()
        if found.dim() == 0:
            found = found.expand(self.models)
        if found.shape != (self.models,):
            raise ConfigError(f"{name} of shape {list(found.shape)}: a number, or one for each of {self.models} models")
        low, high = self.ranges[name]
        # Negated, so that NaN is refused too.
        wrong = (~((found >= low) & (found < high))).nonzero().flatten().tolist()
        if wrong:
            raise ConfigError(f"{name}={float(found[wrong[0]])} of model {wrong[0]}: must be in [{low}, {high})")
        return found.clone()

    # -- stepping ------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of every active slot, of the parameters that have a gradient.

        Args:
            closure: computes the losses and their gradients again, as for optimizers of torch.
        """
        if getattr(self, "found_inf", None) is not None:
            del vars(self)["found_inf"]
            raise ConfigError(
                "a torch.amp.GradScaler has one scale for all models: one that overflows would stop the others. Use "
                f"fusion.GradScaler({self.models})"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        recorded = RECORDER.get()
        if recorded is not None:
            recorded(self)
        for place, group in enumerate(self.param_groups):
            for name in self.ranges:
                if not isinstance(group[name], Tensor) or group[name].shape != (self.models,):
                    group[name] = self._vector(name, group[name])  # the loop has set a number or a list
            # Parameters that share a step counter have the same step counts in all slots, and are updated together.
            together: dict[tuple[int, int | None], list[nn.Parameter]] = {}
            counters: dict[tuple[int | None, torch.device], Tensor] = {}
            for parameter in group["params"]:
                if getattr(parameter, "replaced", False):
                    raise ConfigError(
                        f"the array no longer has a parameter of shape {list(parameter.shape)}: other models were "
                        "selected. Pass the result of array.select to optimizer.select"
                    )
                if parameter.grad is None or not parameter.numel():
                    continue
                state, owner = self.state[parameter], owner_of(parameter)
                if not state:
                    key = owner, parameter.device
                    self._begin(parameter, group, counters[key] if key in counters else _counter_of(parameter))
                    counters[key] = self.state[parameter]["step"]
                together.setdefault((id(state["step"]), owner), []).append(parameter)
            for parameters in together.values():
                self._update(place, group, parameters)
        return loss

    def refresh(self) -> None:
        """Copy hyperparameters and `active` to the devices that hold a copy, where these have changed."""
        for place, device in self._on_device:
            self._values_on(place, device)

    def _values_on(self, place: int, device: torch.device) -> DeviceValues:
        found = self._on_device.get((place, device))
        if found is None:
            found = self._on_device[place, device] = DeviceValues(device)
        # What a stream captures would be repeated with today's values; `refresh` precedes each replay instead.
        if not is_capturing():
            group = self.param_groups[place]
            found.refresh({name: group[name] for name in self.ranges}, self.active)
        return found

    @contextmanager
    def skipping(self, skipped: Tensor) -> Generator[None]:
        """Inside, steps leave these slots unchanged too, bitwise.

        Args:
            skipped: bool [models], on the device of the parameters, or on the CPU.
        """
        self.skipped = skipped
        try:
            yield
        finally:
            self.skipped = None

    def _begin(self, parameter: nn.Parameter, group: Group, step: Tensor) -> None:
        self.state[parameter]["step"] = step
        for name in self.state_names_of(group):
            self.state[parameter][name] = self.initial_state(name, parameter.detach(), group, slots_of(parameter))

    def _update(self, place: int, group: Group, parameters: list[nn.Parameter]) -> None:
        slots, step = slots_of(parameters[0]), self.state[parameters[0]]["step"]
        # A captured step is repeated when other slots are active: it decides on the device.
        fixed = RECORDER.get() is None
        if fixed and not bool(self.active[slots].any()):
            return
        values: dict[str, Tensor] = {name: group[name] for name in self.ranges}
        active = self.active
        if not on_host(step):
            copied = self._values_on(place, step.device)
            values, active = copied.values, copied.active
        if self.skipped is not None:
            active = active & ~self.skipped.to(active.device)
        active = active[slots]
        if on_host(active) and not bool(active.any()):
            return
        every = fixed and self.skipped is None and bool(self.active[slots].all())
        # In place: all parameters of the batch share this counter.
        step += active
        batch = ParameterBatch(
            [parameter.detach() for parameter in parameters],
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            {name: [self.state[parameter][name] for parameter in parameters] for name in self.state_names_of(group)},
            {name: values[name][slots] for name in self.ranges},
            step.double(),
            group,
        )
        if self.row_kernel and not on_host(step):
            batch = batch.in_memory_order()
        if self.row_kernel and batch.fits_row_kernels():
            self.update_rows_(batch, active)
            # Autograd does not see what a kernel writes.
            torch.autograd.graph.increment_version(batch.parameters)
            return
        with nullcontext() if every else inactive_unchanged([batch.parameters, *batch.states.values()], active):
            self.update_(batch)

    def state_names_of(self, group: Group) -> tuple[str, ...]:
        """Return the states that are kept for every parameter of a group."""
        return self.state_names

    def initial_state(self, name: str, parameter: Tensor, group: Group, slots: slice) -> Tensor:
        """Return a state before the first step, in the shape of these slots' part of a parameter."""
        return torch.zeros_like(parameter)

    @abstractmethod
    def update_(self, batch: ParameterBatch) -> None:
        """Update parameters and states of all models by one step."""

    def update_rows_(self, batch: ParameterBatch, active: Tensor) -> None:
        """Update those of the active models, bool [models] on their device, in one pass over memory."""

    def torch_options(self, values: dict[str, float], group: Group) -> dict[str, Any]:
        """Return one model's hyperparameters as torch's own optimizer takes them."""
        found: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith("beta")}
        if "beta1" in values:
            found["betas"] = (values["beta1"], values["beta2"])
        if "nesterov" in values:
            found["nesterov"] = bool(values["nesterov"])
        return found | {name: group[name] for name in self._shared}

    # -- models enter and leave ----------------------------------------------------------------------------------------

    def hyperparameters(self, index: int, group: int = 0) -> dict[str, float]:
        """Return one model's hyperparameters."""
        return {name: float(self.param_groups[group][name][index]) for name in self.ranges}

    @torch.no_grad()
    def extract(self, index: int) -> dict[str, Any]:
        """Return one model's state as the `state_dict` of torch's own optimizer over that model's parameters."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[Group] = []
        count = 0
        for place, group in enumerate(self.param_groups):
            own = [p for p in group["params"] if is_of(p, index)]
            for number, parameter in enumerate(own, count):
                row = 0 if owner_of(parameter) is not None else index
                # torch's optimizers have no state before a parameter's first step.
                if self.state.get(parameter) and float(self.state[parameter]["step"][row]) > 0:
                    state[number] = {name: value[row].clone() for name, value in self.state[parameter].items()}
                    # Torch's optimizers read their step count on the host.
                    state[number]["step"] = state[number]["step"].cpu()
            groups.append({**self._options(index, place), "params": list(range(count, count + len(own)))})
            count += len(own)
        return {"state": state, "param_groups": groups}

    def alone(self, index: int) -> Optimizer:
        """Return an optimizer of torch with one model's hyperparameters, over one number per group."""
        groups: list[Group] = []
        for place, group in enumerate(self.param_groups):
            options = self.torch_options(self.hyperparameters(index, place), group)
            # That of LAMB is an Adam, which has no bounds of the trust ratio.
            known = {name: value for name, value in options.items() if not name.endswith("_trust")}
            groups.append({**known, "params": [nn.Parameter(torch.zeros((), dtype=torch.float32, device="cpu"))]})
        kind: Any = self.torch_class or torch.optim.Adam
        return kind(groups, lr=groups[0]["lr"])

    def _options(self, index: int, place: int) -> dict[str, Any]:
        """Return one model's options in a group, as torch's own optimizer keeps them."""
        options = self.torch_options(self.hyperparameters(index, place), self.param_groups[place])
        if self.torch_class is None:
            return options
        # torch adds options that an array has not, such as `foreach`.
        made = self.torch_class([nn.Parameter(torch.zeros((), dtype=torch.float32, device="cpu"))], **options)
        return {name: value for name, value in made.param_groups[0].items() if name != "params"}

    @torch.no_grad()
    def insert(self, index: int, state_dict: dict[str, Any]) -> None:
        """Load a slot's state from the `state_dict` of torch's own optimizer, or from `extract`; others are unchanged.

        Raises:
            ConfigError: the numbers of groups or parameters differ, or an option that all models share; nothing was
                changed.
        """
        self.check_state(index, state_dict)
        self.changes += 1
        self.reset(index)
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own = [p for p in group["params"] if is_of(p, index)]
            values = dict(given)
            if "betas" in values:
                values["beta1"], values["beta2"] = values["betas"]
            for name in self.ranges:
                if name in values:
                    group[name][index] = float(values[name])
            for parameter, number in zip(own, given["params"], strict=True):
                self._insert_state(parameter, index, state_dict["state"].get(number, {}), group)
        self._share_step_counters()

    def check_state(self, index: int, state_dict: dict[str, Any]) -> None:
        """Refuse a state that `insert` could not continue from.

        Raises:
            ConfigError: the numbers of groups or parameters differ, or an option that all models share.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(f"the state has {len(groups)} groups of parameters, not {len(self.param_groups)}")
        for place, (group, given) in enumerate(zip(self.param_groups, groups, strict=True)):
            own = [p for p in group["params"] if is_of(p, index)]
            if len(own) != len(given["params"]):
                raise ConfigError(f"the state has {len(given['params'])} parameters in a group of {len(own)}")
            options = self._options(index, place)
            for name in _SHARED:
                if name in options and name in given and given[name] != options[name]:
                    raise ConfigError(
                        f"{name}={given[name]} in the state and {options[name]} here, for all models of the array. "
                        f"Continue it by an optimizer with {name}={given[name]}, or train it with {options[name]}"
                    )

    def _insert_state(self, parameter: nn.Parameter, index: int, given: dict[str, Any], group: Group) -> None:
        if not given:
            return
        if not self.state[parameter]:
            self._begin(parameter, group, _counter_of(parameter))
        state = self.state[parameter]
        # This slot's step count may now differ from that of the parameters which share the counter.
        state["step"] = state["step"].clone()
        row = 0 if owner_of(parameter) is not None else index
        for name, value in given.items():
            if name in state and value is not None:
                state[name][row].copy_(torch.as_tensor(value, dtype=state[name].dtype, device=state[name].device))
        if "step" not in given:
            # torch's SGD does not count steps; its formula only needs to know that there was one.
            state["step"][row] = 1

    @torch.no_grad()
    def reset(self, index: int, **hyperparameters: float) -> None:
        """Set a slot's state back to before its first step, and make it active; others are unchanged, bitwise.

        Args:
            index: the slot.
            hyperparameters: new values for it, in all groups.

        Raises:
            ConfigError: no such slot or hyperparameter, or a value out of its range.
        """
        check_slot(index, self.models)
        for name, value in hyperparameters.items():
            if name not in self.ranges:
                raise ConfigError(f"{name}={value}: {type(self).__name__} has {', '.join(self.ranges)} for each model")
            checked = self._vector(name, value)
            for group in self.param_groups:
                group[name][index] = checked[index]
        for group in self.param_groups:
            for parameter in group["params"]:
                owner, state = owner_of(parameter), self.state.get(parameter)
                if not state or not is_of(parameter, index):
                    continue
                row = 0 if owner is not None else index
                state["step"][row] = 0
                for name in self.state_names_of(group):
                    own, slots = parameter.detach()[row : row + 1], slice(index, index + 1)
                    state[name][row].copy_(self.initial_state(name, own, group, slots)[0])
        self.active[index] = True

    @torch.no_grad()
    def select(self, kept: Selection) -> None:
        """Follow `FusedArray.select`: its parameters, all states, hyperparameters and step counts; bitwise."""
        self.changes += 1
        before = self.state
        self.state = type(before)(dict)
        counters: dict[tuple[int, int | None], Tensor] = {}
        for group in self.param_groups:
            parameters: list[nn.Parameter] = []
            for old in group["params"]:
                for new in kept.moved.get(old, (old,)):
                    parameters.append(new)
                    for name, value in (before.get(old) or {}).items():
                        rows = kept.rows(value, old) if owner_of(old) is None else value.clone()
                        # Parameters of a slot that shared a step counter continue to share one.
                        key = id(value), owner_of(new)
                        self.state[new][name] = counters.setdefault(key, rows) if name == "step" else rows
            group["params"] = kept.in_order(parameters)
            for name in self.ranges:
                group[name] = kept.rows(group[name])
        self.active, self.models = kept.rows(self.active), len(kept.indices)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, and which slots are active."""
        return {**super().state_dict(), "active": self.active}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ConfigError: it is of another number of models, or of an optimizer that is not an array's.
        """
        active = state_dict.get("active")
        if active is None:
            raise ConfigError("the state is of one model's optimizer: load it into a slot by insert(slot, state)")
        if len(active) != self.models:
            raise ConfigError(
                f"the state is of {len(active)} models, and there are {self.models}. Fuse as many, or use "
                "fusion.checkpoints, which resizes the array"
            )
        self.changes += 1
        super().load_state_dict(state_dict)
        self.active = state_dict["active"].clone()
        moved: dict[tuple[int, torch.device], Tensor] = {}
        for parameter, state in self.state.items():
            # Torch leaves step counts where they were saved.
            if state and state["step"].device != parameter.device:
                key = id(state["step"]), parameter.device
                state["step"] = moved.setdefault(key, state["step"].to(parameter.device))
        self._share_step_counters()

    def _share_step_counters(self) -> None:
        """Let parameters of a group with the same step counts share one counter, so that they are updated together."""
        for group in self.param_groups:
            known: dict[tuple[Any, ...], Tensor] = {}
            for parameter in group["params"]:
                if state := self.state.get(parameter):
                    key = (owner_of(parameter), tuple(state["step"].tolist()))
                    # A copy: groups that were loaded from a file may share a tensor, which each would increment.
                    state["step"] = known.setdefault(key, state["step"].clone())


def _counter_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(parameter.shape[0], dtype=torch.float32, device=parameter.device)
